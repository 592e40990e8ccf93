"""One kernel of a run, a dump or a file as a Python program of its own. Nothing in a dump is executed."""

from __future__ import annotations

import ast
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.usage import UsageError, join_some, one_of, write_file
from ..graph.formats import kernels_named, known_names
from ..record.run_files import recorded_file
from ..sources.opening import open_source
from ..sources.profile_source import has_profile
from ..sources.result import Result, reading_errors_as_usage
from ..sources.source import Source
from ..spec.dtype import EPS

if TYPE_CHECKING:
    from xlafuse.hlo.text_reader import Module

TEMPLATES = Path(__file__).parent / "repro"
MOST_NAMED = 30


@dataclass(frozen=True)
class Program:
    """One kernel as a program of its own.

    about: words about it. code: what the compiler made, in `language`. checked: it compares the results with those of
    the kernel's operations.
    """

    text: str
    about: str
    code: str
    language: str
    checked: bool


def extract(path: Path, kernel: str, module: str | None, out: Path) -> list[str]:
    """Write the program, and return lines about it. module: a record's id or a module's name, where several fit.

    kernel: its number, or a name (`kernels_named`). Raises UsageError for an unknown kernel, and for one without
    operations or source.
    """
    program = program_of(*kernel_of(open_source(path), kernel, module))
    write_file(out, program.text.encode())
    return [f"{out}: {program.about}", f"python {out}"]


def program_of(source: Result, kernel: str) -> Program:
    """Return the program of a kernel, by the compiler's name. Raises UsageError for one without operations or source.
    """
    title = f"The kernel {kernel} of {source.id}, written by xlafuse extract."
    compiler = source.load().compiler
    if compiler == "inductor":
        facts = next(each.facts for each in source.load().kernels or () if each.name == kernel)
        program = inductor_program(_codes(source), str(facts.get("call", kernel)), title)
    elif compiler == "xla":
        program = _xla(source, kernel, title)
    else:
        raise UsageError(f"{source.id}: kernels of {compiler} are programs of their own")
    ast.parse(program.text)
    return program


def kernel_of(opened: Source, wanted: str, module: str | None) -> tuple[Result, str]:
    """Return the only graph that has the kernel, and the compiler's name of it."""
    choice = [each for each in opened.results if each.read is not None] if module is None else opened.modules(module)
    if opened.kind == "run" and module is None:
        raise UsageError(
            f"{opened.path}: a run; name a record with --module: "
            + ", ".join(each.id for each in choice[:MOST_NAMED])
        )
    graphs = [(each, each.load()) for each in choice]
    having = [(each, graph, found) for each, graph in graphs if (found := kernels_named(graph, wanted))]
    if not having:
        shown = dict.fromkeys(kernel.name for _, graph in graphs for kernel in graph.kernels or ())
        one_of("kernel", wanted, [name for _, graph in graphs for name in known_names(graph)], shown, most=MOST_NAMED)
    if len(having) > 1:
        raise UsageError(
            f"{opened.path}: {len(having)} modules have a kernel {wanted}; choose with --module: "
            + ", ".join(each.id for each, *_ in having[:MOST_NAMED])
        )
    source, graph, indices = having[0]
    kernels = graph.kernels or ()
    names = {kernels[index].name: index for index in reversed(indices)}
    # XLA names a kernel that several instructions share after one of them.
    own = [name for name, index in names.items() if kernels[index].runtime_name == wanted]
    if len(names) > 1 and len(own) != 1:
        listed = [f"{index + 1} {name}" for name, index in sorted(names.items(), key=lambda item: item[1])]
        raise UsageError(
            f"{len(names)} kernels of {source.id} are called {wanted!r}; choose one by number or name: "
            + join_some(listed, MOST_NAMED)
        )
    return source, (own or list(names))[0]


def _xla(source: Result, kernel: str, title: str) -> Program:
    from xlafuse.hlo import kernel_extract

    extracted = None
    problem = UsageError(f"{source.path}: no HLO of {source.id}; XLA writes it with --xla_dump_hlo_as_text")
    for module in _modules(source):
        try:
            extracted = kernel_extract.extract(module, kernel)
            break
        except kernel_extract.NotExtracted as reason:
            problem = UsageError(str(reason))
    if extracted is None:
        raise problem
    values = {
        "OPERATIONS": extracted.operations, "INPUTS": list(extracted.inputs), "DTYPE": extracted.dtype,
        "EPS": EPS.get(extracted.dtype, 0.0), "NOTES": list(extracted.notes),
    }
    count = sum(" = " in line for line in extracted.operations.splitlines())
    about = f"{count} lines of HLO, {len(extracted.inputs)} inputs"
    return Program(_filled("xla_kernel.py", title, values), about, extracted.operations, "", checked=True)


def _modules(source: Result) -> Iterator[Module]:
    """Yield the optimized modules behind a graph, with their text, which XLA prints where there is only a proto."""
    from xlafuse.hlo import file_reader

    with reading_errors_as_usage(source.path):
        compiled = source.compiled()
        if not compiled:
            if has_profile(source.path):
                raise UsageError(f"{source.path}: a profile holds no HLO text; give the folder of XLA's dumps")
            yield file_reader.read(source.path, statements=True)
        for _, artifacts in compiled:
            if file := artifacts.find("hlo") or artifacts.find("hlo_proto"):
                with file.local() as path:
                    yield file_reader.read(path, statements=True)


def inductor_program(codes: Sequence[str], kernel: str, title: str) -> Program:
    """Return the program of a kernel of one of these output codes. Raises UsageError."""
    from xlafuse.triton_side.inductor import kernel_extract

    codes = [code for code in codes if re.search(rf"^{re.escape(kernel)} = ", code, re.MULTILINE)]
    if not codes:
        raise UsageError(f"{kernel}: a call of a library, not a Triton kernel; it has no source to write")
    try:
        extracted, *others = [kernel_extract.extract(code, kernel) for code in codes]
    except kernel_extract.NotExtracted as reason:
        raise UsageError(str(reason)) from None
    if any(other.source != extracted.source for other in others):
        raise UsageError(
            f"{len(codes)} graphs have a kernel {kernel}, and they differ; give one output_code.py"
        )
    values = {
        "NAME": kernel, "SOURCE": extracted.source, "ARGUMENTS": list(extracted.arguments),
        "OPERATIONS": extracted.operations, "READS": extracted.reads, "WRITES": extracted.writes,
        "DTYPE": extracted.dtype, "EPS": EPS.get(extracted.dtype, 0.0), "NOTES": list(extracted.notes),
    }
    count = extracted.operations.count(" = torch.ops.")
    checked = f"checked against {count} operations" if extracted.operations else "no check"
    about = f"{len(extracted.arguments)} arguments, {checked}"
    text = _filled("inductor_kernel.py", title, values)
    return Program(text, about, extracted.source, "python", checked=bool(extracted.operations))


def _codes(source: Result) -> list[str]:
    from xlafuse.triton_side.inductor import dump

    with reading_errors_as_usage(source.path):
        if source.record is None:
            return dump.emitted_codes(source.path)
        if source.record.dumps is None:
            raise UsageError(f"{source.path}: {source.id}: no compiler artifacts were kept")
        packed = recorded_file(source.path, source.record, source.record.dumps).read_bytes()
        with tempfile.TemporaryDirectory() as folder:
            archive = Path(folder) / "dump.zip"
            archive.write_bytes(packed)
            return dump.emitted_codes(archive)


def _filled(template: str, title: str, values: Mapping[str, Any]) -> str:
    """Return a template with its constants set. Raises KeyError for a constant that it lacks."""
    text = (TEMPLATES / template).read_text().replace("TITLE", title, 1)
    for name, value in values.items():
        line = re.compile(rf"^{name}(: [^=\n]+)? = .+$", re.MULTILINE)
        if not line.search(text):
            raise KeyError(name)
        text = _with_line(line, f"{name} = {_written(value)}", text)
    return text


def _with_line(line: re.Pattern[str], written: str, text: str) -> str:
    return line.sub(lambda _: written, text, count=1)


def _written(value: Any) -> str:
    if isinstance(value, str) and "\n" in value:
        plain = "'''" not in value and "\\" not in value and not value.endswith("'")
        return f"'''\\\n{value}'''" if plain else repr(value)
    if isinstance(value, list) and value:
        return "[\n" + "".join(f"    {each!r},\n" for each in value) + "]"
    return repr(value)
