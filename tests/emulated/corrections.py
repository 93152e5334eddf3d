"""What tinygrad's emulator lacks, or gets wrong, of the CDNA code that Triton generates.

From the instruction set's documents; none was checked on hardware.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any


def apply() -> None:
    """Correct the emulator of this process.

    Raises:
        RuntimeError: it is another version than the one that is corrected here.
    """
    from test.mockgpu.amd import emu
    from tinygrad.runtime.autogen.amd.cdna import ins

    # no bytes and halves
    emu._INST_HANDLERS[ins.MUBUF] = functools.partial(_buffer, emu)
    # 16-bit operands in v128 to v255: the high half of a lower register on RDNA only
    rdna = "ctx.wave_size == 32 and "
    _replace(emu, "_load_vsrc0", ("if bits['s0'] == 16:", f"if {rdna}bits['s0'] == 16:"))
    _replace(
        emu,
        "_compile_vop12",
        ("write_hi_half = bits", f"write_hi_half = {rdna}bits"),
        ("vsrc1_hi = bits", f"vsrc1_hi = {rdna}bits"),
    )
    # no row_bcast; and a lane's result was written before another lane read its source
    emu._load_dpp16_src0 = functools.partial(_dpp_source, emu)
    for kind in (ins.VOP1_DPP16, ins.VOP2_DPP16):
        emu._INST_HANDLERS[kind] = functools.partial(_dpp_masked, emu, emu._compile_vop12)
    emu._INST_HANDLERS[ins.VOP1] = functools.partial(_swapped, emu, emu._INST_HANDLERS[ins.VOP1])
    emu.get_pcode = functools.partial(_pcode, emu.get_pcode)
    _replace(
        emu,
        "_compile_mfma",
        # rows of a 32x32 result
        (
            "c_grp * UOp.const(16, dtypes.int) + UOp.const((out_reg // 4) * 4 + out_reg % 4",
            "c_grp * UOp.const(4, dtypes.int) + UOp.const((out_reg // 4) * 8 + out_reg % 4",
        ),
        ("src_type == 'F32'", "src_type in ('F32', 'XF32')"),
        # fp16: denormals, infinity, NaN
        (
            "return exp.eq(_c(0)).where(_c(0), f32_bits)",
            "return h.cast(dtypes.uint16).bitcast(dtypes.half).cast(dtypes.float32)"
            ".bitcast(dtypes.uint32)",
        ),
    )


def _replace(emu: Any, name: str, *changes: tuple[str, str]) -> None:
    """Change phrases of a function, and its entries in the table of handlers."""
    old = getattr(emu, name)
    source = inspect.getsource(old)
    for before, after in changes:
        if source.count(before) != 1:
            raise RuntimeError(f"expected {before!r} once in tinygrad's {name}")
        source = source.replace(before, after)
    exec(compile(source, f"<{name}>", "exec"), emu.__dict__)
    for kind, handler in list(emu._INST_HANDLERS.items()):
        if handler is old:
            emu._INST_HANDLERS[kind] = getattr(emu, name)


def _pcode(plain: Callable[[Any], str], op: Any) -> str:
    """Let the last step of a division divide: it has the operands.

    The steps before it fail where an operand or the quotient is denormal.
    """
    division = op.name.startswith("V_DIV_FIXUP_F32")
    return "D0.f32 = 32'F(64'F(S2.f32) / 64'F(S1.f32))" if division else plain(op)


_BUFFER = re.compile(r"BUFFER_(LOAD|STORE)_([US]?)(BYTE|SHORT|DWORD)X?(\d?)(_D16)?(_HI)?")


def _buffer(emu: Any, inst: Any, ctx: Any) -> Any:
    """Load or store elements of any size of a raw buffer."""
    UOp, dtypes, _c = emu.UOp, emu.dtypes, emu._c
    name = emu._op_name(inst)
    if name.endswith(("_INV", "_WBL2")):
        return UOp.sink(*ctx.inc_pc())
    if emu._iattr(inst, "lds"):
        return emu._compile_mubuf(inst, ctx)
    found = _BUFFER.fullmatch(name)
    if found is None:
        raise NotImplementedError(name)
    way, sign, size, count, half, high = found.groups()
    bits = {"BYTE": 8, "SHORT": 16, "DWORD": 32}[size]
    kind, exec_mask = type(inst), ctx.rexec()
    vdata, vaddr, soffset, offset, offen = (
        ctx.inst_field(getattr(kind, field))
        for field in ("vdata", "vaddr", "soffset", "offset", "offen")
    )
    resource = ctx.inst_field(kind.srsrc) * _c(4)
    base = emu._u64(ctx.rsgpr_dyn(resource), ctx.rsgpr_dyn(resource + _c(1)))
    base = base & UOp.const(0xFFFFFFFFFFFF, dtypes.uint64)
    accumulators = bool(emu._iattr(inst, "acc"))
    read = ctx.raccvgpr_dyn if accumulators else ctx.rvgpr_dyn
    write = ctx.waccvgpr_dyn if accumulators else ctx.wvgpr_dyn
    lane = ctx.range()
    at = offen.ne(_c(0)).where(ctx.rvgpr_dyn(vaddr, lane), _c(0)) + offset
    inside = emu._lane_active(exec_mask, lane) & (at < ctx.rsgpr_dyn(resource + _c(2)))
    # registers from 128 on are constants
    address = base + ctx.rsgpr_dyn(soffset).cast(dtypes.uint64) + at.cast(dtypes.uint64)
    address = inside.where(address, UOp.const(0, dtypes.uint64))
    stores = []
    for i in range(int(count or 1)):
        part = address + UOp.const(4 * i, dtypes.uint64)
        if way == "STORE":
            value = read(vdata + _c(i), lane)
            value = value >> _c(16) if high else value
            stores += emu._mem_store(ctx.vmem, part, value, inside, 64, bits)
            continue
        word = ctx.vmem.index((part >> UOp.const(2, dtypes.uint64)).valid(inside)).load()
        value = inside.where(word, _c(0))
        if bits < 32:
            value = value >> (part.cast(dtypes.uint32) & _c(3)) * _c(8)
            value = inside.where(value, _c(0)) & _c((1 << bits) - 1)
        if sign == "S":
            value = (value ^ _c(1 << bits - 1)) - _c(1 << bits - 1)
        if half:
            old = read(vdata, lane)
            low, upper = (old, value) if high else (value, old >> _c(16))
            value = (low & _c(0xFFFF)) | (upper << _c(16))
        stores.append(write(vdata + _c(i), lane, value, exec_mask))
    return UOp.sink(UOp.group(*stores).end(lane), *ctx.inc_pc())


def _swapped(emu: Any, plain: Callable[..., Any], inst: Any, ctx: Any) -> Any:
    """Exchange the odd rows of one register with the even ones of another, as gfx950 can."""
    found = re.match(r"V_PERMLANE(16|32)_SWAP_B32", emu._op_name(inst))
    if found is None:
        return plain(inst, ctx)
    row = int(found[1])
    UOp, dtypes, _c = emu.UOp, emu.dtypes, emu._c
    odd, even = ctx.inst_field(type(inst).vdst), ctx.inst_field(type(inst).src0) - _c(256)
    read = UOp.placeholder((64,), dtypes.uint32, slot=0, addrspace=emu.AddrSpace.LOCAL)
    stores = [
        read.index(_c(lane, dtypes.int)).store(ctx.rvgpr_dyn(register, _c(lane, dtypes.int)))
        for lane in range(64)
        for register in (odd if lane & row else even,)
    ]
    held, at, mask = read.after(UOp.group(*stores)), ctx.range(32), ctx.rexec()
    lane = at + (at & _c(-row, dtypes.int))
    other = lane + _c(row, dtypes.int)
    writes = (
        ctx.wvgpr_dyn(odd, other, held.index(lane).load(), mask),
        ctx.wvgpr_dyn(even, lane, held.index(other).load(), mask),
    )
    return UOp.sink(UOp.group(*writes).end(at), *ctx.inc_pc())


def _source_lanes(control: int) -> list[int | None]:
    """Return the lane that each lane reads under a DPP control; None outside of its row."""

    def source(lane: int) -> int | None:
        row, at, n = lane & ~15, lane & 15, control & 15
        if control < 0x100:  # quad_perm
            return (lane & ~3) + (control >> 2 * (lane & 3) & 3)
        if 0x100 < control < 0x110:  # row_shl
            return row + at + n if at + n < 16 else None
        if 0x110 < control < 0x120:  # row_shr
            return row + at - n if at >= n else None
        if 0x120 < control < 0x130:  # row_ror
            return row + (at - n & 15)
        if 0x150 <= control < 0x160:  # row_newbcast
            return row + n
        others = {
            0x140: row + 15 - at,  # row_mirror
            0x141: lane & ~7 | 7 - (lane & 7),  # row_half_mirror
            0x142: row - 1 if row else None,  # row_bcast:15
            0x143: (lane & ~31) - 1 if lane >= 32 else None,  # row_bcast:31
        }
        if control not in others:
            raise NotImplementedError(f"DPP {control:#x}")
        return others[control]

    return [source(lane) for lane in range(64)]


def _dpp_source(emu: Any, ctx: Any, inst: Any, lane: Any, fallback: Any) -> Any:
    UOp, dtypes, _c = emu.UOp, emu.dtypes, emu._c
    register = ctx.inst_field(type(inst).vsrc0)
    read = UOp.placeholder((64,), dtypes.uint32, slot=0, addrspace=emu.AddrSpace.LOCAL)
    stores = [
        read.index(_c(to, dtypes.int)).store(
            _c(0) if at is None else ctx.rvgpr_dyn(register, _c(at, dtypes.int))
        )
        for to, at in enumerate(_source_lanes(emu._iattr(inst, "dpp")))
    ]
    return read.after(UOp.group(*stores)).index(lane.cast(dtypes.int)).load()


def _dpp_masked(emu: Any, handler: Callable[..., Any], inst: Any, ctx: Any) -> Any:
    """Leave alone the lanes that ``row_mask``, ``bank_mask`` and the bounds disable."""
    rows, banks = emu._iattr(inst, "row_mask", 15), emu._iattr(inst, "bank_mask", 15)
    mask = sum(
        1 << lane
        for lane, source in enumerate(_source_lanes(emu._iattr(inst, "dpp")))
        if rows >> lane // 16 & 1
        and banks >> (lane & 15) // 4 & 1
        and (source is not None or emu._iattr(inst, "bc"))
    )
    whole = type(ctx)

    class Masked(whole):
        __slots__ = ()

        def rexec(self) -> Any:
            return super().rexec() & emu.UOp.const(mask, emu.dtypes.uint64)

    ctx.__class__ = Masked
    return handler(inst, ctx)
