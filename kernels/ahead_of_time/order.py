"""Whether a kernel that moves data inside one tensor waits between its loads and stores.

The threads of a block run at their own pace, and Triton does not make them wait for each other
where one thread's store could meet another thread's load. So a barrier has to stand between a
tile's loads and its stores, and between its stores and the next tile's loads. Where every tile
only reads behind what the tiles before it wrote (`forward`), the second one is not needed.

Here every path through the compiled kernel is followed: a tensor that was loaded since the last
barrier must not be stored to, nor one that was stored to be loaded.
"""

from __future__ import annotations

from collections import deque

from .ptx import Instruction, Program, Tensor

_Pending = frozenset[tuple[str, Tensor, int]]
"""What happened since the last barrier on some path: "load" or "store", the tensor, the line."""


def order_faults(
    program: Program, parameters: dict[str, str], *, forward: bool = False
) -> list[str]:
    """What is wrong with the order of loads, barriers and stores; empty if nothing is.

    Args:
        program: the compiled kernel.
        parameters: the kernel's name of each pointer argument, by its name in the PTX.
        forward: the kernel promises that no iteration of a loop loads what an earlier one stored,
            so a store is forgotten where the loop starts over. Loads never are.

    Returns:
        One sentence per fault.
    """
    try:
        successors = [program.successors(i) for i in range(len(program.instructions))]
    except ValueError as error:
        return [str(error)]
    faults: dict[str, None] = {}
    accesses: list[list[tuple[str, Tensor]]] = []
    for instruction in program.instructions:
        accesses.append(_accesses(program, instruction, parameters, faults))
    both = _tensors(accesses, "load") & _tensors(accesses, "store")
    if not both and not faults:
        return ["it is declared in place, but no tensor is both loaded and stored."]
    entering: list[_Pending] = [frozenset()] * len(program.instructions)
    waiting = deque(range(len(program.instructions)))
    while waiting:
        index = waiting.popleft()
        instruction = program.instructions[index]
        leaving = entering[index]
        if program.is_barrier(instruction):
            leaving = frozenset()
        touched = {(what, tensor) for what, tensor in accesses[index] if tensor in both}
        leaving |= {(what, tensor, instruction.line) for what, tensor in touched}
        for following in successors[index]:
            arriving = leaving
            if forward and following <= index:
                arriving = frozenset(each for each in leaving if each[0] == "load")
            if not arriving <= entering[following]:
                entering[following] |= arriving
                waiting.append(following)
    for instruction, pending, access in zip(program.instructions, entering, accesses, strict=True):
        for what, tensor in access:
            for before, other, line in sorted(pending):
                if other == tensor and before != what:
                    name = _name(tensor, parameters)
                    faults[
                        f"no barrier separates the {before} of {name} in line {line} from the "
                        f"{what} in line {instruction.line} that can follow it."
                    ] = None
    return list(faults)


def without_barriers(text: str) -> str:
    """The same PTX with every barrier taken out: what the check has to find wrong."""
    lines = text.splitlines()
    return "\n".join(line for line in lines if not line.split("//")[0].strip().startswith("bar"))


def _accesses(
    program: Program,
    instruction: Instruction,
    parameters: dict[str, str],
    faults: dict[str, None],
) -> list[tuple[str, Tensor]]:
    if instruction.parts[0] == "call":
        faults["it calls a function, into which the check cannot follow."] = None
    if not (instruction.loads or instruction.stores):
        return []
    what = "load" if instruction.loads else "store"
    tensors = [each for each in program.tensors(instruction) if each[0] in parameters]
    if not tensors:
        faults[f"the check cannot tell to which tensor line {instruction.line} {what}s."] = None
    if instruction.is_asynchronous_load:
        faults[
            f"line {instruction.line} loads in the background, so no barrier after it orders the "
            "load (num_stages=1 keeps loads in their place)."
        ] = None
    return [(what, tensor) for tensor in sorted(tensors)]


def _tensors(accesses: list[list[tuple[str, Tensor]]], wanted: str) -> set[Tensor]:
    return {tensor for access in accesses for what, tensor in access if what == wanted}


def _name(tensor: Tensor, parameters: dict[str, str]) -> str:
    parameter, depth = tensor
    return parameters[parameter] if depth == 0 else f"a tensor of the table {parameters[parameter]}"
