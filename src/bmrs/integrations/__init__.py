"""Other libraries: each module here needs the one it is named after."""
