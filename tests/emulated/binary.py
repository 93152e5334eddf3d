"""A kernel that Triton compiled for an AMD GPU, laid out in this process's memory."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

PAGE = 4096


@dataclass(frozen=True, eq=False)
class Binary:
    """Its code, what its descriptor says, and what has been made of it for the emulator."""

    name: str
    start: int  # address of the first byte
    size: int
    entry: int  # address of the first instruction
    descriptor: Any
    memory: ctypes.Array[ctypes.c_char] = field(repr=False)
    table: dict[str, Any] = field(default_factory=dict)  # by the architecture's name

    @property
    def flushes(self) -> bool:
        """Whether fp32 denormals are 0."""
        return (self.descriptor.compute_pgm_rsrc1 >> 16) & 3 == 0

    @property
    def first_place(self) -> int:
        """The scalar register of a program's first coordinate."""
        return (self.descriptor.compute_pgm_rsrc2 >> 1) & 31

    def place(self, coordinates: tuple[int, ...]) -> list[int]:
        """Return the coordinates of a program that the kernel asks for."""
        asked = self.descriptor.compute_pgm_rsrc2 >> 7
        return [x for axis, x in enumerate(coordinates) if asked >> axis & 1]

    def user_registers(self, arguments: int) -> list[int]:
        """Return the scalar registers that a launch sets; ``arguments``: an address.

        What traps and asserts would ask for, the queue and the packet, is not there.
        """
        found: list[int] = []
        for bit, count in enumerate((4, 2, 2, 2, 2, 2, 1)):
            if self.descriptor.kernel_code_properties >> bit & 1:
                value = {3: arguments, 6: self.descriptor.private_segment_fixed_size}.get(bit, 0)
                found += [value >> 32 * word & 0xFFFFFFFF for word in range(count)]
        return found


def load(name: str, code: bytes) -> Binary:
    """Lay out the sections of an hsaco of one kernel."""
    from tinygrad.runtime.autogen import amdgpu_kd
    from tinygrad.runtime.support.elf import elf_loader

    image, sections, relocations = elf_loader(code)
    if relocations:
        raise RuntimeError(f"{name}: expected code without relocations, got {len(relocations)}")
    (place,) = (section.header.sh_addr for section in sections if section.name == ".rodata")
    kind = amdgpu_kd.llvm_amdhsa_kernel_descriptor_t
    descriptor = kind.from_buffer_copy(bytes(image[place : place + ctypes.sizeof(kind)]))
    memory = (ctypes.c_char * (len(image) + 2 * PAGE))()  # instructions are decoded past the end
    start = (ctypes.addressof(memory) + PAGE - 1) // PAGE * PAGE
    ctypes.memmove(start, bytes(image), len(image))
    entry = start + place + descriptor.kernel_code_entry_byte_offset
    return Binary(name, start, len(image), entry, descriptor, memory)
