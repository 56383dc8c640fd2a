"""``python -m bmrs`` is ``bmrs``."""

from bmrs.cli import main

if __name__ == "__main__":
    main()
