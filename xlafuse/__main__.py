"""The program `xlafuse`, also as `python -m xlafuse`."""

from .compare.__main__ import main

if __name__ == "__main__":
    main()
