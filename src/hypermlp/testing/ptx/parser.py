"""PTX text to a kernel: instructions in basic blocks, registers by name, parameters, the size of its static shared memory.

Only what Triton's compiler writes and what tests need: one entry per text, no functions, no data besides shared memory.
"""

from __future__ import annotations

import functools
import itertools
import re
from dataclasses import dataclass
from typing import NamedTuple

from hypermlp.testing.ptx.faults import UnknownInstruction

WIDTHS = {"pred": 0, "b8": 1, "b16": 2, "b32": 4, "b64": 8}
CLASS_OF = {f"{kind}{bits}": f"b{bits}" for bits in (8, 16, 32, 64) for kind in "busf"} | {"pred": "pred"}
CONTROL = ("bra", "bra.uni", "ret", "exit", "bar.sync", "barrier.sync", "barrier.sync.aligned", "trap")


@dataclass(frozen=True, slots=True)
class Address:
    """[base + offset]; base is a register, a parameter or a symbol of shared memory."""

    base: str
    offset: int


Operand = str | Address | tuple[str, ...]


class Instruction(NamedTuple):
    opcode: str
    operands: tuple[Operand, ...]
    predicate: str | None
    negated: bool
    text: str
    source: str  # file and line of the kernel's Python, where the compiler says it

    def __str__(self) -> str:
        return f"`{self.text}`" + (f" ({self.source})" if self.source else "")


class BasicBlock(NamedTuple):
    """Instructions that run one after another; the control instruction that ends them, if one does."""

    instructions: tuple[Instruction, ...]
    control: Instruction | None


class Kernel(NamedTuple):
    name: str
    threads: int
    parameters: dict[str, str]  # name → type, in order
    registers: dict[str, str]  # name → class, a key of WIDTHS
    symbols: dict[str, int]  # name → address in shared memory
    static_shared: int
    blocks: tuple[BasicBlock, ...]
    targets: dict[str, int]  # label → block


ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\((.*?)\)([^{]*)\{", re.S)
PARAMETER = re.compile(r"\.param\s+\.(\w+)\s+(?:\.ptr\s+)?(?:\.global\s+)?(?:\.align\s+\d+\s+)?([\w$]+)$")
SHARED = re.compile(r"\.shared\s+\.align\s+(\d+)\s+\.b8\s+([\w$]+)\[(\d*)\]")
STATEMENT = re.compile(
    r"\s*(?:(?P<open>\{)|(?P<close>\})|\.loc\b(?P<loc>[^\n]*)|(?P<label>[$\w]+):|(?P<declaration>\.[^;]*);|(?P<code>[^;]+);)"
)
REGISTER = re.compile(r"([%$\w]+?)(?:<(\d+)>)?$")
WORD = re.compile(r"[%$A-Za-z_][%$\w.]*")


@functools.lru_cache(maxsize=512)
def parse(text: str) -> Kernel:
    text = "\n".join(line if line.lstrip().startswith(".loc") else line.partition("//")[0] for line in text.splitlines())
    entries = list(ENTRY.finditer(text))
    if len(entries) != 1:
        raise UnknownInstruction(f"PTX must have one .entry, this has {len(entries)}")
    entry = entries[0]
    threads = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)(?!\s*,)", entry[3])
    if threads is None or int(threads[1]) % 32 or not 32 <= int(threads[1]) <= 1024:
        raise UnknownInstruction(f"{entry[1]}: .reqntid must be one multiple of 32 up to 1024, found {entry[3].strip()!r}")
    parameters = {}
    for declared in filter(None, (part.strip() for part in entry[2].split(","))):
        found = PARAMETER.match(declared)
        if found is None:
            raise UnknownInstruction(f"{entry[1]}: unknown parameter {declared!r}")
        parameters[found[2]] = found[1]
    return Body(entry[1], int(threads[1]), parameters, text[: entry.start()]).read(text, entry.end())


class Body:
    """The statements between the braces of an entry."""

    def __init__(self, name: str, threads: int, parameters: dict[str, str], before: str) -> None:
        self.name, self.threads, self.parameters = name, threads, parameters
        self.scopes: list[tuple[int, dict[str, str]]] = [(0, {})]  # number, declared names or prefixes → class
        self.opened = 0
        self.registers: dict[str, str] = {}
        self.symbols: dict[str, int] = {}
        self.shared_end = 0
        self.code: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.source = ""
        for declared in SHARED.finditer(before):
            self._declare_shared(declared)

    def read(self, text: str, at: int) -> Kernel:
        while self.scopes:
            found = STATEMENT.match(text, at)
            if found is None:
                raise UnknownInstruction(f"{self.name}: cannot read {text[at : at + 80]!r}")
            at = found.end()
            if found["open"]:
                self.opened += 1
                self.scopes.append((self.opened, {}))
            elif found["close"]:
                self.scopes.pop()
            elif found["loc"] is not None:
                self.source = found["loc"].partition("//")[2].partition("@")[0].strip()
            elif found["label"]:
                self.labels[found["label"]] = len(self.code)
            elif found["declaration"]:
                self._declare(found["declaration"])
            else:
                self.code.append(self._instruction(found["code"].strip()))
        return self._cut()

    def _declare(self, text: str) -> None:
        shared = SHARED.match(text)
        kind = re.match(r"\.reg\s+\.(\w+)\s+(.*)$", text, re.S)
        if shared:
            self._declare_shared(shared)
        elif kind and kind[1] in CLASS_OF:
            names = self.scopes[-1][1]
            for declared in kind[2].split(","):
                found = REGISTER.match(declared.strip())
                if found is None:
                    raise UnknownInstruction(f"{self.name}: cannot read {text!r}")
                prefixed = [f"{found[1]}{n}" for n in range(int(found[2]))] if found[2] else [found[1]]
                names.update(dict.fromkeys(prefixed, CLASS_OF[kind[1]]))
        elif not text.startswith(".pragma"):  # those are advice for the assembler
            raise UnknownInstruction(f"{self.name}: unknown directive {text!r}")

    def _declare_shared(self, found: re.Match[str]) -> None:
        alignment = int(found[1])
        start = -(-self.shared_end // alignment) * alignment
        self.symbols[found[2]] = start
        self.shared_end = start + int(found[3] or 0)

    def _instruction(self, text: str) -> Instruction:
        text = " ".join(text.split())
        guard = re.match(r"@(!?)([%$\w]+)\s+", text)
        opcode, _, rest = text[guard.end() if guard else 0 :].partition(" ")
        operands = tuple(self._operand(part) for part in split_operands(rest))
        predicate = self._word(guard[2]) if guard else None
        return Instruction(opcode, operands, predicate, bool(guard and guard[1]), text, self.source)

    def _operand(self, text: str) -> Operand:
        if text.startswith("{"):
            return tuple(self._word(part.strip()) for part in text[1:-1].split(","))
        if text.startswith("["):
            found = re.match(r"\[\s*([%$\w]+)\s*(?:([+-])\s*(-?\w+))?\s*\]$", text)
            if found is None:
                raise UnknownInstruction(f"{self.name}: unknown address {text}")
            offset = int(found[3], 0) if found[3] else 0
            return Address(self._word(found[1]), -offset if found[2] == "-" else offset)
        if "|" in text:
            return tuple(self._word(part.strip()) for part in text.split("|"))
        return self._word(text)

    def _word(self, text: str) -> str:
        """A name as it is known to the whole kernel: registers of an inner scope get its number."""
        if not WORD.match(text):
            return text
        for number, names in reversed(self.scopes):
            if text in names:
                unique = f"{text}@{number}" if number else text
                self.registers[unique] = names[text]
                return unique
        return text

    def _cut(self) -> Kernel:
        """Blocks begin at labels that something jumps to, and after control instructions."""
        jumps = {x for i in self.code if i.opcode.startswith("bra") for x in i.operands if isinstance(x, str)}
        if jumps - self.labels.keys():
            raise UnknownInstruction(f"{self.name}: unknown labels {sorted(jumps - self.labels.keys())}")
        starts = {0} | {self.labels[label] for label in jumps}
        starts |= {n + 1 for n, i in enumerate(self.code) if i.opcode in CONTROL}
        cuts = sorted(starts | {len(self.code)})
        blocks = []
        for first, end in itertools.pairwise(cuts):
            part = self.code[first:end]
            control = part.pop() if part and part[-1].opcode in CONTROL else None
            blocks.append(BasicBlock(tuple(part), control))
        number = {start: n for n, start in enumerate(cuts)}
        targets = {label: number[self.labels[label]] for label in jumps}
        return Kernel(
            self.name, self.threads, self.parameters, self.registers, self.symbols, self.shared_end, tuple(blocks), targets
        )


def split_operands(text: str) -> list[str]:
    """At commas outside brackets."""
    return [part.strip() for part in re.findall(r"(?:[^,{\[]|\{[^}]*\}|\[[^\]]*\])+", text) if part.strip()]
