"""`xlafuse ...`, which is `python -m compare ...`."""

from compare.cli import cli


def main() -> None:
    cli(prog_name="xlafuse")


if __name__ == "__main__":
    main()
