"""The folder of the project's packages."""

from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
