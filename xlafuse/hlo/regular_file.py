"""A check for regular files: a FIFO blocks its reader forever, and a device never ends."""

import errno
import stat
from pathlib import Path


def require_regular(path: Path) -> None:
    """Raise OSError where the path leads to anything but a regular file or folder, or to nothing.

    Opening a folder raises an error of its own.
    """
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError(errno.EINVAL, "neither a regular file nor a folder", str(path))
