"""The commands of ``bmrs``, one module each, on what they share.

``options``: their options, alike in all, with completion. ``errors``: one sentence for what went wrong, and the exit
code. ``screens``: progress and tables. ``data``, ``losses``, ``recipe`` and ``loop`` are what ``train`` does;
``cutting`` is what ``prune`` does. Each builds on the public interface of :mod:`bmrs` alone.
"""
