"""Random HLO modules that XLA's parser accepts, in every form that its grammar allows except the short one."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

Shape = tuple  # ("f32", (8, 64)), or ("tuple", (Shape, ...))

_FLOAT = ("f32", "bf16", "f16", "f64", "f8e4m3fn")
_INTEGER = ("s32", "u8", "s64", "s4")
_UNARY = ("negate", "exponential", "tanh", "sqrt", "logistic", "abs", "cosine", "floor", "copy")
_BINARY = ("add", "multiply", "subtract", "maximum", "minimum", "divide", "power")
_STRINGS = (
    '"plain"', r'"a \"quoted\" word"', r'"back\\slash"', '"braces } ) ] {"', '"// no comment"', '"/* nor this"',
    r'"jit(f)/norm/\303\251"', "'single'", r'"line\nbreak\t"', '"a,b=c"', '"x = f32[2] add(y, z)"', '""',
)
_SEPARATORS = (
    " ", " ", " ", "  ", "\t", "\n    ", " /* note */ ", " // a remark, with = and {\n", "\n\n", " /*index=5*/ ",
    " /* two\n lines * / */ ", "\r\n", " // carriage return\r",
)
_CONFIGURATIONS = (
    '{"a":{"b":["1"]},"s":"} {"}', r'"{\"n\": \"12\"}"', '"opaque"', "{}", '{"brackets": )([ , it\'s: {"no": "JSON"}}',
    '{"url": "https://a/*", k: // kept\n 1}', '{\n  "lines": {\n    "n": "12"\n  }\n}',
)
_MATRIX: Shape = ("f32", (4, 8))
_WINDOW = [",", "window=", "{", "size=2x3 stride=2x1 pad=0_0x1_1", "}"]
# Operation, shape, operands (m, o: matrices, s: a scalar, p: a predicate), attributes.
_PLAIN: tuple[tuple[str, Shape, str, tuple[str, ...]], ...] = (
    ("compare", ("pred", (4, 8)), "mo", (",", "direction=", "LT")),
    ("select", _MATRIX, "pmo", ()),
    ("broadcast", _MATRIX, "s", (",", "dimensions=", "{", "}")),
    ("reshape", ("f32", (8, 2, 2)), "m", ()),
    ("transpose", ("f32", (8, 4)), "m", (",", "dimensions=", "{", "1", ",", "0", "}")),
    ("slice", ("f32", (2, 7)), "m", (",", "slice=", "{", "[0:4:2]", ",", "[1:8]", "}")),
    ("concatenate", ("f32", (8, 8)), "mo", (",", "dimensions=", "{", "0", "}")),
    ("pad", ("f32", (8, 7)), "ms", (",", "padding=", "1_0_1x0_-1")),
    ("dot", ("f32", (4, 4)), "mo", (",", "lhs_contracting_dims=", "{1}", ",", "rhs_contracting_dims=", "{1}")),
    ("clamp", _MATRIX, "sms", ()),
    ("convert", ("bf16", (4, 8)), "m", ()),
    ("exponential", _MATRIX, "m", (",", "result_accuracy=", "{", "mode=", "highest", "}")),
)
_TIGHT = set(",(){}[]")  # no space is needed next to these


@dataclass
class _Value:
    name: str
    shape: Shape


@dataclass
class Grammar:
    """One module. tokens: of the text; spaces and comments come between them."""

    random: Random
    tokens: list[str] = field(default_factory=list)
    names: int = 0
    computations: dict[str, list[str]] = field(default_factory=dict)  # by what they compute

    def text(self) -> str:
        module = self.random.random() < 0.8
        if module:
            self._put("HloModule", self._name("module"))
            self._header()
        fills = {
            "add": self._combiner, "block": self._block, "less": self._less, "condition": self._condition,
        }
        for stem, fill in fills.items():
            count = self.random.randrange(1, 3)
            self.computations[stem] = [self._computation(stem, fill, brief=not module) for _ in range(count)]
        entry = self.random.random() < 0.7
        self._computation("main", self._entry, entry, brief=not module)
        if module and entry and self.random.random() < 0.3:
            self._computation("unused", self._combiner)
        return self._joined()

    # Text

    def _joined(self) -> str:
        pieces = []
        margin = "    " * self.random.randrange(3)
        for token, after in zip(self.tokens, [*self.tokens[1:], ""], strict=True):
            pieces.append(token)
            if token.endswith("="):  # of an attribute
                pieces.append(self.random.choice(("", "", " ", "\n  ")))
            elif token == "\n":
                pieces.append(margin)
            elif token[-1] in _TIGHT or after[:1] in _TIGHT:
                pieces.append(self._separator() if self.random.random() < 0.15 else "")
            else:
                pieces.append(self._separator() if self.random.random() < 0.15 else " ")
        return margin + "".join(pieces)

    def _separator(self) -> str:
        return self.random.choice(_SEPARATORS)

    def _put(self, *tokens: str) -> None:
        self.tokens.extend(tokens)

    def _maybe(self, chance: float = 0.5) -> bool:
        return self.random.random() < chance

    def _name(self, stem: str) -> str:
        self.names += 1
        return self.random.choice((f"{stem}.{self.names}", f"{stem}_{self.names}", f"{stem}-x{self.names}"))

    def _reference(self, name: str) -> str:
        return self.random.choice((f"%{name}", name))

    def _filled(self, fill):  # type: ignore[no-untyped-def]
        """Write the instructions of a computation, half of the time with names that other computations have, too."""
        before = self.names
        if self._maybe() and fill != self._entry:
            self.names = 1000
        parts = fill()
        self.names = max(before, self.names % 1000)
        return parts

    # Modules and computations

    def _header(self) -> None:
        if self._maybe(0.3):
            self._put(",", "is_scheduled=", self.random.choice(("true", "false")))
        if self._maybe(0.2):
            self._put(",", "frontend_attributes=", "{", "a=", self._string(), "}")
        if self._maybe(0.2):
            self._put(",", "num_partitions=", "2", ",", "replica_count=", "1")
        self._put("\n")

    def _computation(self, stem: str, fill, entry: bool = False, brief: bool = False) -> str:  # type: ignore[no-untyped-def]
        name = self._name(stem)
        if entry:
            self._put("ENTRY")
        self._put(self._reference(name))
        place = len(self.tokens)
        self._put("{", "\n")
        parameters, result = self._filled(fill)
        self._put("}")
        if self._maybe(0.2) and not entry:
            self._put(",", "execution_thread=", '"main"')
        if self._maybe(0.3):
            self._put(f" // {name}\n")
        self._put("\n")
        if not brief and self._maybe():
            signature = ["("]
            for at, value in enumerate(parameters):
                signature += [*([","] if at else []), f"{value.name}:", *self._shape(value.shape, layout=False)]
            self.tokens[place:place] = [*signature, ")", "->", *self._shape(result.shape, layout=False)]
        return name

    def _combiner(self) -> tuple[list[_Value], _Value]:
        values = [self._parameter(("f32", ()), at) for at in range(2)]
        return values, self._statement("add", ("f32", ()), values, is_last=True)

    def _block(self) -> tuple[list[_Value], _Value]:
        value = self._parameter(("f32", (4, 8)), 0)
        middle = self._statement(self.random.choice(_UNARY), value.shape, [value])
        return [value], self._statement(self.random.choice(_BINARY), value.shape, [middle, value], is_last=True)

    def _entry(self) -> tuple[list[_Value], _Value]:
        shapes: list[Shape] = [("f32", (4, 8)), ("f32", ()), ("pred", ())]
        shapes += [self._random_shape() for _ in range(self.random.randrange(4))]
        values = [self._parameter(shape, at) for at, shape in enumerate(shapes)]
        parameters = list(values)
        for _ in range(self.random.randrange(2, 9)):
            values.append(self._random_statement(values))
        return parameters, self._statement("tuple", ("tuple", tuple(v.shape for v in values)), values, is_last=True)

    def _condition(self) -> tuple[list[_Value], _Value]:
        value = self._parameter(("f32", (4, 8)), 0)
        return [value], self._written("constant", ("pred", ()), "constant", ["false"], [], is_last=True)

    def _less(self) -> tuple[list[_Value], _Value]:
        values = [self._parameter(("f32", ()), at) for at in range(4)]
        direction = [",", "direction=", "LT"]
        return values, self._statement("compare", ("pred", ()), values[:2], direction, is_last=True)

    def _called(self, attribute: str, stem: str) -> list[str]:
        return [attribute, self._reference(self.random.choice(self.computations[stem]))]

    # Shapes

    def _random_shape(self, depth: int = 0) -> Shape:
        if depth < 2 and self._maybe(0.25):
            return ("tuple", tuple(self._random_shape(depth + 1) for _ in range(self.random.randrange(4))))
        rank = self.random.randrange(4)
        dims = tuple(self.random.choice((0, 1, 2, 8, 64, "<=8", "?")) for _ in range(rank))
        return (self.random.choice(_FLOAT + _INTEGER + ("pred", "c64")), dims)

    def _shape(self, shape: Shape, layout: bool = True) -> list[str]:
        kind, parts = shape
        if kind == "tuple":
            tokens = ["("]
            for at, part in enumerate(parts):
                tokens += [*([","] if at else []), *self._shape(part, layout)]
            return [*tokens, ")"]
        tokens = [kind, "["]
        for at, size in enumerate(parts):
            tokens += [*([","] if at else []), str(size)]
        tokens.append("]")
        if layout and parts and self._maybe(0.4):
            order = list(range(len(parts)))
            self.random.shuffle(order)
            tokens.append("{")
            for at, dimension in enumerate(order):
                tokens += [*([","] if at else []), str(dimension)]
            extra = [
                *(["T(8,128)"] if self._maybe(0.3) else []), *(["E(4)"] if kind == "s4" and self._maybe() else []),
                *(["S(5)"] if self._maybe(0.3) else []),
            ]
            if extra:
                tokens += [":", "".join(extra)]
            tokens.append("}")
        return tokens

    # Instructions

    def _parameter(self, shape: Shape, number: int) -> _Value:
        return self._written("p", shape, "parameter", [str(number)], [])

    def _statement(
        self, opcode: str, shape: Shape, operands: list[_Value], attributes: list[str] = [], *,  # noqa: B006
        is_last: bool = False,
    ) -> _Value:
        tokens: list[str] = []
        for at, operand in enumerate(operands):
            tokens += [*([","] if at else []), *self._operand(operand)]
        return self._written(opcode, shape, opcode, tokens, attributes, is_last)

    def _operand(self, value: _Value) -> list[str]:
        tokens = self._shape(value.shape) if self._maybe(0.2) and not _dynamic(value.shape) else []
        return [*tokens, self._reference(value.name)]

    def _written(
        self, stem: str, shape: Shape, opcode: str, inside: list[str], attributes: list[str], is_last: bool = False,
        layout: bool = True,
    ) -> _Value:
        name = self._name(stem.replace("-", "_"))
        if is_last and self._maybe():
            self._put("ROOT")
        self._put(self._reference(name), "=", *self._shape(shape, layout))
        self._put(opcode, "(", *inside, ")", *attributes)
        self._extras(opcode)
        if self._maybe(0.9):
            self._put("\n")
        return _Value(name, shape)

    def _extras(self, opcode: str) -> None:
        if self._maybe(0.3):
            keys = [("op_name=", self._string()), ("source_file=", '"model.py"'), ("source_line=", "12")]
            self.random.shuffle(keys)
            self._put(",", "metadata=", "{")
            for at, pair in enumerate(keys[: self.random.randrange(4)]):
                self._put(*([","] if at and self._maybe() else []), *pair)
            self._put("}")
        if self._maybe(0.15):
            self._put(",", "frontend_attributes=", "{", "a=", self._string(), ",", "b=", '{"k": [1, {"x": "}"}]}', "}")
        if self._maybe(0.1) and opcode not in ("tuple", "parameter", "while"):
            self._put(",", "sharding=", "{", self.random.choice(("replicated", "maximal device=0", "manual")), "}")
        if self._maybe(0.15):
            self._put(",", "backend_config=", self.random.choice(_CONFIGURATIONS))
        if self._maybe(0.1):
            self._put(",", "statistics=", "{", "visualizing_index=", "1", ",", "stat-1=", "33", "}")

    def _string(self) -> str:
        return self.random.choice(_STRINGS)

    def _random_statement(self, values: list[_Value]) -> _Value:
        matrices = [v for v in values if v.shape == _MATRIX]
        matrix, other = self.random.choice(matrices), self.random.choice(matrices)
        scalar = self.random.choice([v for v in values if v.shape == ("f32", ())])
        predicate = next(v for v in values if v.shape == ("pred", ()))
        forms = (
            lambda: self._plain(matrix, other, scalar, predicate),
            lambda: self._plain(matrix, other, scalar, predicate),
            lambda: self._statement(self.random.choice(_UNARY), _MATRIX, [matrix]),
            lambda: self._statement(self.random.choice(_BINARY), _MATRIX, [matrix, other]),
            lambda: self._with_computation("reduce", ("f32", (4,)), [matrix, scalar], "{1}"),
            lambda: self._with_computation("reduce-window", ("f32", (2, 8)), [matrix, scalar], "", _WINDOW),
            self._constant,
            lambda: self._element(matrix, scalar),
            lambda: self._fusion(matrix),
            lambda: self._conditional(predicate, matrix, other),
            lambda: self._loop(matrix),
            lambda: self._call(matrix),
            lambda: self._custom_call(matrix, scalar),
            lambda: self._written("iota", ("s32", (4, 8)), "iota", [], [",", "iota_dimension=", "1"]),
            lambda: self._after(matrix, other),
            lambda: self._asynchronous(matrix),
            lambda: self._sort(matrix, other),
            lambda: self._barrier(self.random.choice(values)),
        )
        return self.random.choice(forms)()

    def _plain(self, matrix: _Value, other: _Value, scalar: _Value, predicate: _Value) -> _Value:
        """Write an operation whose attributes name no computation."""
        opcode, shape, kinds, attributes = self.random.choice(_PLAIN)
        given = {"m": matrix, "o": other, "s": scalar, "p": predicate}
        return self._statement(opcode, shape, [given[kind] for kind in kinds], list(attributes))

    def _element(self, matrix: _Value, scalar: _Value) -> _Value:
        value = self._statement("tuple", ("tuple", (matrix.shape, scalar.shape)), [matrix, scalar])
        return self._statement("get-tuple-element", scalar.shape, [value], [",", "index=", "1"])

    def _custom_call(self, matrix: _Value, scalar: _Value) -> _Value:
        target = [",", "custom_call_target=", self.random.choice(('"f"', '"__cublas$gemm"', r'"a\"b"'))]
        constraints = [",", "operand_layout_constraints=", "{", "f32[4,8]{1,0}", "}"]
        target += self.random.choice((constraints, [",", *self._called("to_apply=", "block")], []))
        return self._statement("custom-call", ("tuple", (matrix.shape, scalar.shape)), [matrix], target)

    def _after(self, matrix: _Value, other: _Value) -> _Value:
        attribute = [",", "control-predecessors=", "{", matrix.name, "}"]
        return self._statement("negate", other.shape, [other], attribute)

    def _barrier(self, value: _Value) -> _Value:
        return self._statement("opt-barrier", value.shape, [value])

    def _constant(self) -> _Value:
        shape, literal = self.random.choice((
            (("f32", ()), "-1.5e-3"), (("f32", ()), "inf"), (("f32", ()), "-inf"), (("f32", ()), "nan"),
            (("pred", ()), "true"), (("pred", (2,)), "{ true, false }"), (("s32", (3,)), "{1, -2, 3}"),
            (("f32", (2, 2)), "{ { 1, 2.5 },\n { /*i1=1*/ 3, 4 } }"), (("c64", ()), "(1, -2)"), (("u8", (0,)), "{}"),
            (("bf16", (2, 3)), "{...}"), (("tuple", (("f32", ()), ("s32", ()))), "(1, 2)"),
            (("s4", (2, 1, 2)), "{ { { 1, 2 } }, { { 3, -4 } } }"),
        ))
        return self._written("constant", shape, "constant", [literal], [], layout=False)  # XLA ignores E(4) here

    def _asynchronous(self, matrix: _Value) -> _Value:
        shape: Shape = ("tuple", (("tuple", (matrix.shape,)), matrix.shape, ("u32", ())))
        updates = ["negate-update"] * self.random.randrange(2)
        value = matrix
        for opcode in ("negate-start", *updates, "negate-done"):  # their shapes must agree, with layouts
            result = matrix.shape if opcode == "negate-done" else shape
            value = self._written(opcode, result, opcode, [self._reference(value.name)], [], layout=False)
        return value

    def _sort(self, matrix: _Value, other: _Value) -> _Value:
        called = self._called("to_apply=", "less")
        attributes = [",", "dimensions=", "{1}", ",", *called]
        return self._statement("sort", ("tuple", (matrix.shape, other.shape)), [matrix, other], attributes)

    def _with_computation(
        self, opcode: str, shape: Shape, operands: list[_Value], dimensions: str, attributes: list[str] = [],  # noqa: B006
    ) -> _Value:
        given = [*attributes, *([",", "dimensions=", dimensions] if dimensions else [])]
        called = self._called("to_apply=", "add")
        given = [*given, ",", *called] if self._maybe() else [",", *called, *given]
        return self._statement(opcode, shape, operands, given)

    def _fusion(self, matrix: _Value) -> _Value:
        called = self._called("calls=", "block")
        kind = ["kind=", self.random.choice(("kLoop", "kInput", "kCustom"))]
        attributes = [",", *kind, ",", *called] if self._maybe() else [",", *called, ",", *kind]
        return self._statement("fusion", matrix.shape, [matrix], attributes)

    def _call(self, matrix: _Value) -> _Value:
        return self._statement("call", matrix.shape, [matrix], [",", *self._called("to_apply=", "block")])

    def _conditional(self, predicate: _Value, first: _Value, second: _Value) -> _Value:
        if self._maybe():
            attributes = [",", *self._called("true_computation=", "block")]
            attributes += [",", *self._called("false_computation=", "block")]
            return self._statement("conditional", first.shape, [predicate, first, second], attributes)
        index = self._written("constant", ("s32", ()), "constant", ["1"], [])

        names = [self._reference(self.random.choice(self.computations["block"])) for _ in range(2)]
        attributes = [",", "branch_computations=", "{", names[0], ",", names[1], "}"]
        return self._statement("conditional", first.shape, [index, first, second], attributes)

    def _loop(self, matrix: _Value) -> _Value:
        attributes = [",", *self._called("condition=", "condition"), ",", *self._called("body=", "block")]
        return self._statement("while", matrix.shape, [matrix], attributes)


def _dynamic(shape: Shape) -> bool:
    kind, parts = shape
    return any(map(_dynamic, parts)) if kind == "tuple" else any(isinstance(size, str) for size in parts)
