"""Merging of XLA's autotuning results in text form, which `configure_environment(record_autotune_to=...)` records."""

import re
from collections.abc import Iterable

# entries {
#   key {
#     ...
#   }
# }
_ENTRY = re.compile(r"^entries \{\n(?:[ ].*\n)*\}\n", re.MULTILINE)
_KEY = re.compile(r"^  key \{\n((?:    .*\n)*)  \}\n", re.MULTILINE)


def merge_results(texts: Iterable[str]) -> str:
    """Merge the results of several processes with one jax version; of two entries with equal keys the later one stays.

    XLA overwrites its file with the results of the running process, so each process records to a separate file.

    Raises ValueError on text that is not such results in jax 0.11's format.
    """
    entries: dict[str, str] = {}
    for text in texts:
        rest = _ENTRY.sub("", text)
        if rest.strip():
            raise ValueError(
                "autotuning results hold `entries { key {...} value {...} }` and nothing else; "
                f"got {rest.strip()[:80]!r}. Merge only files that jax 0.11 recorded"
            )
        for entry in _ENTRY.findall(text):
            key = _KEY.search(entry)
            if key is None:
                raise ValueError(f"an autotuning entry has a key; got {entry[:80]!r}. Record the file again")
            entries[key[1]] = entry
    return "".join(entries[key] for key in sorted(entries))
