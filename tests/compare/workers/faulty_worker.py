"""A framework's worker whose softmax has the faulty implementations, too: `faulty_worker.py ROLE`."""

import sys
from dataclasses import replace

from xlafuse.compare.spec.blocks import BLOCKS
from xlafuse.compare.spec.implementation import Implementation
from xlafuse.compare.workers import main

# Name, which is the function's, and compiler.
IN_ANY_CALL = (
    "right", "wrong_scale", "not_a_number", "unwritten_element", "cached_result", "changes_input", "missing_output",
    "wrong_shape", "raises", "breaks_device", "killed", "segfault", "leaves", "hangs", "out_of_memory",
    "prints_megabytes",
)
ON_A_GPU = ("side_stream", "joined_side_stream", "late_thread", "keeps_l2", "illegal_access", "endless_kernel")
IN_A_COMPILE = {"triton_error": "triton", "inductor_error": "inductor", "nvrtc_error": "cuda", "xla_error": "xla"}
IN_XLA = ("xla_right", "xla_wrong_scale", "xla_out_of_memory")

FAULTY = (
    *(Implementation(name, f"faulty:{name}", "eager", name) for name in (*IN_ANY_CALL, *ON_A_GPU)),
    *(
        Implementation(name, f"{'faulty_xla' if compiler == 'xla' else 'faulty'}:{name}", compiler, name)
        for name, compiler in IN_A_COMPILE.items()
    ),
    *(Implementation(name, f"faulty_xla:{name}", "xla", name) for name in IN_XLA),
    Implementation("import_fails", "no_such_module:apply", "eager", "no such module"),
    Implementation("right_at_last", "faulty:right", "eager", "after all the others"),
)

BLOCKS["softmax"] = replace(BLOCKS["softmax"], implementations=(*BLOCKS["softmax"].implementations, *FAULTY))

if __name__ == "__main__":
    sys.exit(main.main())
