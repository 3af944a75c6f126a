"""Read PTX, NVIDIA's assembly text, as far as the checks need it.

Instructions with their operands and source lines, where control can go from each, and which tensor
a global load or store touches. Language: https://docs.nvidia.com/cuda/parallel-thread-execution/
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

Tensor = tuple[str, int]
"""A kernel parameter, and how many pointers are read on the way from it to the data: 0 for a tensor
that is passed itself, 1 for one whose address stands in a table that is passed."""


@dataclass(frozen=True)
class Instruction:
    """One PTX instruction."""

    opcode: str
    """Such as `ld.global.v4.b32`."""
    operands: tuple[str, ...]
    predicate: str | None
    """Register that says whether the thread executes it; None if it always does."""
    location: tuple[str, int, int]
    """File name, line and column of the kernel's source; `("", 0, 0)` if not stated."""

    @property
    def parts(self) -> list[str]:
        """The opcode's parts, such as `["ld", "global", "v4", "b32"]`."""
        return self.opcode.split(".")

    @property
    def line(self) -> int:
        """Line of the kernel's source."""
        return self.location[1]

    @property
    def loads(self) -> bool:
        """Whether it reads global memory, at once or on the way to shared memory."""
        parts = self.parts
        return (parts[0] in ("ld", "ldu") and "global" in parts) or self.is_asynchronous_load

    @property
    def is_asynchronous_load(self) -> bool:
        """Whether it copies from global to shared memory in the background."""
        return re.match(r"cp\.async\.(ca|cg|bulk)\b.*\.shared\S*\.global", self.opcode) is not None

    @property
    def stores(self) -> bool:
        """Whether it writes global memory."""
        return self.parts[0] == "st" and "global" in self.parts

    @property
    def updates(self) -> bool:
        """Whether it is an atomic operation on global memory."""
        return self.parts[0] in ("atom", "red") and "global" in self.parts

    @property
    def bytes(self) -> int:
        """Bytes that a thread loads or stores, or copies asynchronously."""
        if self.is_asynchronous_load:
            # A bulk copy of a tensor's tile does not say; no thread loads wider than its 16 bytes.
            size = self.operands[2] if len(self.operands) > 2 else "16"
            return int(size, 0) if size[0].isdigit() else 16
        parts = self.parts
        count = next((int(part[1:]) for part in parts if re.fullmatch(r"v\d", part)), 1)
        return count * int(re.sub(r"\D", "", parts[-1])) // 8

    @property
    def address(self) -> str:
        """The operand that holds the address in global memory."""
        bracketed = [operand for operand in self.operands if operand.startswith("[")]
        return bracketed[1 if self.is_asynchronous_load else 0]


class Program:
    """A kernel's instructions, in the order of the text.

    Args:
        text: PTX of one kernel.

    Raises:
        ValueError: the text has no kernel.
    """

    def __init__(self, text: str) -> None:
        found = re.search(r"\.entry\s+([\w$]+)", text)
        if found is None:
            raise ValueError("the PTX has no .entry, so no kernel.")
        self.name = found.group(1)
        threads = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", text)
        self.threads = int(threads.group(1)) if threads else None
        """Threads of a block, where the text says it."""
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        """Index of the instruction that follows each label."""
        self._read(text[found.start() :], dict(re.findall(r'\.file\s+(\d+)\s+"([^"]*)"', text)))

    def _read(self, text: str, files: dict[str, str]) -> None:
        location = ("", 0, 0)
        pending = ""
        # Every line of one piece of inline assembly would count as a source line of its own.
        in_assembly = False
        start = text.index("{")
        for raw in text[start + 1 :].splitlines():
            if "begin inline asm" in raw or "end inline asm" in raw:
                in_assembly = "begin" in raw
                continue
            line = raw.split("//")[0].strip()
            if place := re.match(r"\.loc\s+(\d+)\s+(\d+)\s+(\d+)", line):
                if not in_assembly:
                    file = files.get(place.group(1), "").rpartition("/")[2]
                    location = (file, int(place.group(2)), int(place.group(3)))
                continue
            if line.startswith((".file", ".section")):
                return
            if label := re.match(r"([$\w]+):\s*", line):
                self.labels[label.group(1)] = len(self.instructions)
                line = line[label.end() :]
            *complete, pending = f"{pending} {line}".split(";")
            for statement in complete:
                if (instruction := _instruction(statement, location)) is not None:
                    self.instructions.append(instruction)

    def successors(self, index: int) -> list[int]:
        """Instructions that may follow instruction `index`; none if the kernel ends there.

        Raises:
            ValueError: it jumps to a place that only the running kernel knows.
        """
        instruction = self.instructions[index]
        kind = instruction.parts[0]
        following = [index + 1] if index + 1 < len(self.instructions) else []
        if kind in ("ret", "exit", "trap"):
            return following if instruction.predicate else []
        if kind == "brx":
            raise ValueError("the kernel has a computed jump, which the check cannot follow.")
        if kind == "bra":
            target = [self.labels[instruction.operands[0]]]
            target = [each for each in target if each < len(self.instructions)]
            return target + (following if instruction.predicate else [])
        return following

    def is_barrier(self, instruction: Instruction) -> bool:
        """Whether all threads of the block wait for each other there.

        Barriers that only some threads reach do not count.
        """
        if instruction.predicate is not None:
            return False
        if instruction.opcode == "bar.warp.sync":
            return self.threads == 32
        if instruction.parts[0] not in ("bar", "barrier") or "sync" not in instruction.parts:
            return False
        # A second operand is the number of threads that take part.
        return instruction.operands[0] == "0" and len(instruction.operands) == 1

    def tensors(self, instruction: Instruction) -> frozenset[Tensor]:
        """The tensors into which the address of a global load or store may point."""
        found: set[Tensor] = set()
        for register in _registers(instruction.address):
            found |= self._origins(register)
        return frozenset(found)

    @cached_property
    def _definitions(self) -> dict[str, list[Instruction]]:
        definitions: dict[str, list[Instruction]] = defaultdict(list)
        for instruction in self.instructions:
            if instruction.parts[0] in ("st", "bra", "ret", "bar", "barrier", "red", "cp"):
                continue
            for register in _registers(instruction.operands[0] if instruction.operands else ""):
                definitions[register].append(instruction)
        return definitions

    @cached_property
    def _shared_values(self) -> set[str]:
        """Registers whose values are stored to shared memory."""
        stores = [each for each in self.instructions if each.opcode.startswith("st.shared")]
        operands = [operand for store in stores for operand in store.operands[1:]]
        return {register for operand in operands for register in _registers(operand)}

    @cached_property
    def _known_origins(self) -> dict[str, set[Tensor]]:
        return {}

    def _origins(self, register: str) -> set[Tensor]:
        """The parameters from which the value of a register may be computed."""
        if register in self._known_origins:
            return self._known_origins[register]
        # Known from here on, though not complete, so that a pointer that is loaded through itself
        # ends the search.
        found = self._known_origins[register] = set()
        seen = {register}
        waiting = [register]
        while waiting:
            for definition in self._definitions.get(waiting.pop(), []):
                if definition.opcode.startswith("ld.param"):
                    found.add((re.sub(r"[\[\]\s]|\+.*", "", definition.operands[1]), 0))
                elif definition.opcode.startswith("ld.shared"):
                    # Pointers that change threads: they may be any that were put there.
                    waiting += self._shared_values - seen
                    seen |= self._shared_values
                elif definition.loads:
                    # Narrower numbers are indices, which say nothing about the tensor.
                    if definition.parts[-1].endswith("64"):
                        found |= {(name, depth + 1) for name, depth in self.tensors(definition)}
                else:
                    sources = {
                        each for part in definition.operands[1:] for each in _registers(part)
                    }
                    # Predicates select among pointers; what they compare are not pointers.
                    sources = {each for each in sources - seen if not re.match(r"%p\d", each)}
                    seen |= sources
                    waiting += sources
        return found


def _registers(operand: str) -> list[str]:
    return re.findall(r"%[A-Za-z_]+\d+", operand)


def _instruction(statement: str, location: tuple[str, int, int]) -> Instruction | None:
    # Braces that open or close a scope; those of a vector operand stand after the opcode.
    statement = re.sub(r"^[\s{}]+", "", statement).strip()
    predicate = None
    if guard := re.match(r"@(!?%\w+)\s+", statement):
        predicate = guard.group(1)
        statement = statement[guard.end() :]
    if not statement or statement.startswith("."):
        return None
    opcode, _, rest = statement.replace("\t", " ").partition(" ")
    return Instruction(opcode, tuple(_operands(rest)), predicate, location)


def _operands(text: str) -> list[str]:
    """Split at the commas that stand outside of braces, brackets and parentheses."""
    found = [""]
    depth = 0
    for character in text:
        depth += (character in "{[(") - (character in "}])")
        if character == "," and depth == 0:
            found.append("")
        else:
            found[-1] += character
    return [operand.strip() for operand in found if operand.strip()]
