"""Loads, stores and copies; what memory refuses; orders of warps and programs."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from snippets import KINDS, at_thread, entry, load, register, store

from hypermlp.testing.ptx import Fault, Race, run
from hypermlp.testing.ptx.compiler import same_program
from hypermlp.testing.ptx.instructions import RULES

ORDERS = ("together", "forward", "reverse", 5)
each_order = pytest.mark.parametrize("order", ORDERS)


def access(name: str) -> tuple[str, int]:
    """Type and number of elements of a load or store."""
    vector = re.search(r"\.v([24])\.", name)
    return name.rsplit(".", 1)[1], int(vector[1]) if vector else 1


def names(kind: str, count: int) -> str:
    found = [register(kind, 10 + n) for n in range(count)]
    return "{" + ", ".join(found) + "}" if count > 1 else found[0]


@pytest.mark.parametrize("space", ["global", "shared"])
def test_every_load_and_store_moves_its_bytes(space: str) -> None:
    for opcode in (name for name in RULES if name.startswith((f"ld.{space}", f"st.{space}"))):
        kind, count = access(opcode)
        vector = f".v{count}" if count > 1 else ""
        size = count * np.dtype(KINDS[kind]).itemsize
        x = torch.randint(0, 256, (32 * size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
        y = torch.zeros_like(x)
        reading = opcode if opcode.startswith("ld") else f"ld.{space}{vector}.{kind}"
        writing = opcode if opcode.startswith("st") else f"st.{space}{vector}.{kind}"
        regs = names(kind, count)
        way = f"{at_thread(1, size, 20)} {at_thread(2, size, 21)} mul.lo.u32 %r20, %r199, {size}; "
        if space == "global":
            body = way + f"{reading} {regs}, [%rd20]; {writing} [%rd21], {regs};"
        else:
            plain = f"global{vector}.{kind}"
            body = (
                way
                + f"ld.{plain} {regs}, [%rd20]; {writing} [%r20], {regs}; {reading} {regs}, [%r20]; st.{plain} [%rd21], {regs};"
            )
        run(entry(body, 2, shared=1024), (1,), [x, y])
        assert torch.equal(x, y), opcode


def test_narrow_numbers_keep_their_sign_in_wide_registers() -> None:
    x, y = torch.arange(-16, 16, dtype=torch.int8), torch.zeros(32, dtype=torch.int32)
    for kind, expected in (("s8", x.int()), ("u8", x.int() & 255)):
        run(entry(f"{at_thread(1, 1, 20)} ld.global.{kind} %r10, [%rd20]; {store('b32', 2, 10)}", 2), (1,), [x, y])
        assert torch.equal(y, expected)


def test_every_parameter() -> None:
    out = torch.zeros(32, dtype=torch.int32)
    body = "ld.param.u32 %r5, [k_param_1]; ld.param.f32 %r6, [k_param_2]; cvt.rzi.s32.f32 %r6, %r6; add.s32 %r5, %r5, %r6;"
    run(entry(body + store("b32", 1, 5), 1, numbers=2), (1,), [out, -7, 100.0])
    assert (out == 93).all()
    opcodes = {name for name in RULES if name.startswith("ld.param")}
    for name in sorted(opcodes):
        kind = name.split(".")[-1]
        out = torch.zeros(32 * np.dtype(KINDS[kind]).itemsize, dtype=torch.uint8)
        text = entry(f"{name} {register(kind, 9)}, [k_param_1];" + store(kind, 1, 9), 1)
        text = text.replace(
            "k_param_0)", f"k_param_0, .param .{kind.replace('8', '16') if kind.endswith('b8') else kind} k_param_1)"
        )
        run(text, (1,), [out, 3.0 if kind[0] == "f" else 77])
        assert (out.numpy().view(KINDS[kind]) == (3 if kind[0] == "f" else 77)).all(), name


@each_order
def test_a_grid(order: str | int) -> None:
    """Every program writes its own place; 21 programs do not fill the last wave."""
    out = torch.zeros(3, 1, 7, 64, dtype=torch.int32)
    place = "mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ctaid.z; mov.u32 %r3, %nctaid.x; mad.lo.s32 %r4, %r2, %r3, %r1;"
    place += (
        "mov.u32 %r5, %ntid.x; mad.lo.s32 %r6, %r4, %r5, %r199; mad.wide.u32 %rd5, %r6, 4, %rd1; st.global.b32 [%rd5], %r6;"
    )
    took = run(entry(place, 1, threads=64), (7, 1, 3), [out], order=order)
    assert torch.equal(out.flatten(), torch.arange(out.numel(), dtype=torch.int32))
    assert took.programs == 21


EXCHANGE = "mul.lo.u32 %r1, %r199, 4; st.shared.b32 [%r1], %r199; bar.sync 0; xor.b32 %r2, %r1, 128; ld.shared.b32 %r3, [%r2];"


@each_order
def test_warps_exchange_over_a_barrier(order: str | int) -> None:
    out = torch.zeros(64, dtype=torch.int32)
    run(entry(EXCHANGE + store("b32", 1, 3), 1, threads=64, shared=256), (1,), [out], order=order)
    assert torch.equal(out, torch.arange(64, dtype=torch.int32) ^ 32)


@each_order
def test_a_missing_barrier_is_a_race(order: str | int) -> None:
    """In every order: the one that reads first reads what nobody wrote."""
    text = entry(EXCHANGE.replace("bar.sync 0;", "") + store("b32", 1, 3), 1, threads=64, shared=256)
    with pytest.raises(Fault, match=r"k, program .*(nobody wrote|nothing between)"):
        run(text, (1,), [torch.zeros(64, dtype=torch.int32)], order=order)


@each_order
def test_overwriting_what_another_warp_reads_is_a_race(order: str | int) -> None:
    text = entry(EXCHANGE + "st.shared.b32 [%r1], %r3;", 0, threads=64, shared=256)
    with pytest.raises(Race, match=r"`st\.shared\.b32 \[%r1\], %r3` writes byte \d+ of shared memory|`ld\.shared"):
        run(text, (1,), [], order=order)


def test_warps_may_write_the_same_value_and_no_other() -> None:
    same, other = ("mov.b32 %r1, 8; mov.b32 %r2, 5; st.shared.b32 [%r1], %r2;", "mov.b32 %r1, 8; st.shared.b32 [%r1], %r199;")
    run(entry(same, 0, threads=64, shared=256), (1,), [])
    for order in ORDERS:
        with pytest.raises(Race):
            run(entry(other, 0, threads=64, shared=256), (1,), [], order=order)


def test_lanes_of_one_warp_may_write_different_values_to_a_place() -> None:
    """One of them wins. Compiled programs do so where lanes hold one number, summed in different orders."""
    out = torch.zeros(32, dtype=torch.int32)
    body = "mov.b32 %r1, 8; st.shared.b32 [%r1], %r199; ld.shared.b32 %r2, [%r1];"
    run(entry(body + store("b32", 1, 2), 1, shared=256), (1,), [out])
    assert len(out.unique()) == 1


@each_order
@pytest.mark.parametrize("reads", [True, False])
def test_programs_of_a_launch_are_not_ordered(order: str | int, reads: bool) -> None:
    """Program 1 reads or writes what program 0 writes."""
    x = torch.zeros(64, dtype=torch.int32)
    touch = "ld.global.b32 %r2, [%rd3];" if reads else "st.global.b32 [%rd3], %r1;"
    body = f"mov.u32 %r1, %ctaid.x; setp.eq.u32 %p1, %r1, 0; {at_thread(1, 4, 3)} @%p1 st.global.b32 [%rd3], %r1; @!%p1 {touch}"
    with pytest.raises(Race, match=r"argument 0, which .*program"):
        run(entry(body, 1), (2,), [x], order=order)


def test_programs_may_read_the_same_and_write_their_own() -> None:
    x, y = torch.arange(32, dtype=torch.int32), torch.zeros(4, 32, dtype=torch.int32)
    body = (
        load("b32", 1, 5)
        + "mov.u32 %r1, %ctaid.x; mad.lo.s32 %r2, %r1, 32, %r199; mad.wide.u32 %rd5, %r2, 4, %rd2; st.global.b32 [%rd5], %r5;"
    )
    run(entry(body, 2), (4,), [x, y])
    assert (y == x).all()


def test_warps_of_a_program_race_in_global_memory_without_a_barrier() -> None:
    x = torch.zeros(64, dtype=torch.int32)
    turn = "xor.b32 %r3, %r199, 32; mad.wide.u32 %rd4, %r3, 4, %rd1; ld.global.b32 %r5, [%rd4];"
    for barrier, faults in (("", True), ("bar.sync 0;", False)):
        text = entry(f"{at_thread(1, 4, 3)} st.global.b32 [%rd3], %r199; {barrier} {turn}", 1, threads=64)
        if faults:
            with pytest.raises(Race):
                run(text, (1,), [x])
        else:
            run(text, (1,), [x])


def test_several_warps_read_before_one_writes() -> None:
    """All warps read a place, then one of them writes it: its own read is not the only one."""
    body = "ld.global.b32 %r5, [%rd1]; setp.eq.u32 %p1, %r199, 0; {} @%p1 st.global.b32 [%rd1], %r199;"
    x = torch.zeros(1, dtype=torch.int32)
    run(entry(body.format("bar.sync 0;"), 1, threads=64), (1,), [x])
    for order in ORDERS:
        with pytest.raises(Race):
            run(entry(body.format(""), 1, threads=64), (1,), [x], order=order)


@pytest.mark.parametrize("offset, says", [(-4, "bytes -4 to 0"), (4, "bytes 128 to 132"), (1 << 33, "outside")])
def test_global_bounds(offset: int, says: str) -> None:
    x = torch.zeros(32, dtype=torch.int32)
    body = f"{at_thread(1, 4, 3)} mov.b64 %rd4, {offset}; add.s64 %rd3, %rd3, %rd4; ld.global.b32 %r1, [%rd3];"
    with pytest.raises(Fault, match=says):
        run(entry(body, 1), (1,), [x])


def test_an_address_of_no_tensor() -> None:
    with pytest.raises(Fault, match="belongs to no tensor"):
        run(entry("mov.b64 %rd1, 4096; ld.global.b32 %r1, [%rd1];", 0), (1,), [])


def test_tensors_beside_each_other_are_kept_apart() -> None:
    """Two views of one buffer: an index beyond the first does not reach the second, unless they overlap."""
    both = torch.zeros(64, dtype=torch.int32)
    body = "ld.global.b32 %r1, [%rd1 + 128];"
    with pytest.raises(Fault, match="argument 0"):
        run(entry(body, 2), (1,), [both[:32], both[32:]])
    run(entry(body, 2), (1,), [both[:33], both[32:]])


def test_a_tensor_that_begins_and_ends_inside_a_granule() -> None:
    """16 bytes at a time from an address that is a multiple of 8."""
    x = torch.arange(20, dtype=torch.int32)
    text = entry(
        "setp.eq.u32 %p1, %r199, 0; @%p1 ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1 + 8];"
        " @%p1 st.global.v4.b32 [%rd1 + 24], {%r4, %r3, %r2, %r1};",
        1,
    )
    run(text, (1,), [x[2:18]])
    assert x.tolist() == [*range(8), 7, 6, 5, 4, *range(12, 20)]


def test_alignment() -> None:
    x = torch.zeros(64, dtype=torch.int32)
    with pytest.raises(Fault, match="global address is not a multiple of 8"):
        run(entry("ld.global.v2.b32 {%r1, %r2}, [%rd1 + 4];", 1), (1,), [x])
    with pytest.raises(Fault, match="shared address is not a multiple of 8"):
        run(entry("mov.b32 %r1, 4; st.shared.v2.b32 [%r1], {%r1, %r1};", 0, shared=64), (1,), [])


def test_shared_bounds_and_bytes_nobody_wrote() -> None:
    with pytest.raises(Fault, match="shared address 64 is outside of 64 bytes"):
        run(entry("mov.b32 %r1, 60; st.shared.b32 [%r1 + 4], %r1;", 0, shared=64), (1,), [])
    with pytest.raises(Fault, match="nobody wrote"):
        run(entry("mov.b32 %r1, 60; ld.shared.b32 %r2, [%r1];", 0, shared=64), (1,), [])


def test_registers_nobody_wrote_hold_nan() -> None:
    """In every program, also where an earlier one has written them."""
    x = torch.zeros(2, 32)
    body = (
        "mov.u32 %r1, %ctaid.x; mad.lo.s32 %r2, %r1, 32, %r199; mad.wide.u32 %rd3, %r2, 4, %rd1; "
        "st.global.b32 [%rd3], %r9; mov.b32 %r9, 0;"
    )
    run(entry(body, 1), (2,), [x], order="forward")
    assert x.isnan().all()


COPY = (
    "mul.lo.u32 %r1, %r199, 16; mad.wide.u32 %rd3, %r199, 16, %rd1; mad.wide.u32 %rd4, %r199, 16, %rd2; "
    "cp.async.cg.shared.global [%r1], [%rd3], 16, {size};"
)
TAKE = "ld.shared.v4.b32 {{%r2, %r3, %r4, %r5}}, [%r1]; st.global.v4.b32 [%rd4], {{%r2, %r3, %r4, %r5}};"


@pytest.mark.parametrize("opcode, width", [("cp.async.cg", 16), ("cp.async.ca", 4), ("cp.async.ca", 8), ("cp.async.ca", 16)])
@pytest.mark.parametrize("wait", ["cp.async.commit_group; cp.async.wait_group 0;", "cp.async.wait_all;"])
def test_copies_arrive_when_waited_for(opcode: str, width: int, wait: str) -> None:
    """Lanes whose size is 0 write zeros and read nothing."""
    words = width // 4
    x, y = torch.arange(1, 32 * words + 1, dtype=torch.int32), torch.zeros(32 * words, dtype=torch.int32)
    vector, regs = {1: ("", "%r2"), 2: (".v2", "{%r2, %r3}"), 4: (".v4", "{%r2, %r3, %r4, %r5}")}[words]
    body = (
        f"mul.lo.u32 %r1, %r199, {width}; "
        f"{at_thread(1, width, 3)} {at_thread(2, width, 4)} setp.lt.u32 %p1, %r199, 20; selp.b32 %r6, {width}, 0, %p1;"
    )
    body += f"@!%p1 add.s64 %rd3, %rd3, 1048576; {opcode}.shared.global [%r1], [%rd3], {width}, %r6; {wait}"
    body += f"ld.shared{vector}.b32 {regs}, [%r1]; st.global{vector}.b32 [%rd4], {regs};"
    run(entry(body, 2, shared=512), (1,), [x, y])
    assert torch.equal(y, torch.where(torch.arange(32 * words) < 20 * words, x, 0))


@pytest.mark.parametrize(
    "wait", ["", "cp.async.commit_group;", "cp.async.commit_group; cp.async.wait_group 1;", "cp.async.wait_group 0;"]
)
def test_reading_a_copy_that_was_not_waited_for(wait: str) -> None:
    x, y = torch.arange(128, dtype=torch.int32), torch.zeros(128, dtype=torch.int32)
    with pytest.raises(Race, match="not waited for"):
        run(entry(COPY.format(size=16) + wait + TAKE.format(), 2, shared=512), (1,), [x, y])


def test_waiting_for_the_older_of_two_groups() -> None:
    x, y = torch.arange(256, dtype=torch.int32), torch.zeros(128, dtype=torch.int32)
    second = "cp.async.cg.shared.global [%r1 + 512], [%rd3 + 512], 16; cp.async.commit_group; cp.async.wait_group 1;"
    text = entry(COPY.format(size=16) + "cp.async.commit_group;" + second + TAKE.format(), 2, shared=1024)
    run(text, (1,), [x, y])
    assert torch.equal(x[:128], y)
    with pytest.raises(Race, match="not waited for"):
        run(
            text.replace("ld.shared.v4.b32 {%r2, %r3, %r4, %r5}, [%r1]", "ld.shared.v4.b32 {%r2, %r3, %r4, %r5}, [%r1 + 512]"),
            (1,),
            [x, y],
        )


def test_a_copy_over_what_another_warp_still_reads() -> None:
    """The copy may arrive at once, whatever is waited for later."""
    x = torch.arange(256, dtype=torch.int32)
    fill = (
        "mul.lo.u32 %r1, %r199, 16; st.shared.v4.b32 [%r1], {%r1, %r1, %r1, %r1}; bar.sync 0; "
        "xor.b32 %r7, %r1, 512; ld.shared.b32 %r8, [%r7];"
    )
    copy = "mad.wide.u32 %rd3, %r199, 16, %rd1; cp.async.cg.shared.global [%r1], [%rd3], 16; cp.async.wait_all;"
    run(entry(fill + "bar.sync 0;" + copy, 1, threads=64, shared=1024), (1,), [x])
    with pytest.raises(Race, match=r"cp\.async"):
        run(entry(fill + copy, 1, threads=64, shared=1024), (1,), [x])


@each_order
@pytest.mark.parametrize("way", ["ret;", "bar.sync 0;"])
def test_a_barrier_that_only_some_warps_reach(order: str | int, way: str) -> None:
    """The others end, or wait at another one."""
    text = f"setp.lt.u32 %p1, %r199, 32; @%p1 bra $FIRST; {way} bra.uni $END; $FIRST: bar.sync 0; $END:"
    with pytest.raises(Fault, match="of their program"):
        run(entry(text, 0, threads=64), (1,), [], order=order)


def test_programs_leave_a_loop_at_different_times() -> None:
    """Lanes of several programs that run side by side take different ways, over barriers, and meet again."""
    out = torch.zeros(8, 64, dtype=torch.int32)
    body = """
    mov.u32 %r1, %ctaid.x; mov.b32 %r2, 0; mov.b32 %r3, 0; mul.lo.u32 %r6, %r199, 4; xor.b32 %r7, %r6, 128;
    $LOOP: st.shared.b32 [%r6], %r2; bar.sync 0; ld.shared.b32 %r8, [%r7]; bar.sync 0;
    add.s32 %r3, %r3, %r8; add.s32 %r2, %r2, 1; setp.le.u32 %p1, %r2, %r1; @%p1 bra $LOOP;
    mad.lo.s32 %r4, %r1, 64, %r199; mad.wide.u32 %rd5, %r4, 4, %rd1; st.global.b32 [%rd5], %r3;
    """
    for order in ORDERS:
        out.zero_()
        run(entry(body, 1, threads=64, shared=256), (8,), [out], order=order)
        assert out.tolist() == [[n * (n + 1) // 2] * 64 for n in range(8)]


def test_lanes_of_a_warp_take_different_ways() -> None:
    """Each lane halves its number until it is odd; a shuffle in that loop would need all of them."""
    x, y = torch.arange(1, 33, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    body = (
        load("b32", 1, 5)
        + "$LOOP: and.b32 %r6, %r5, 1; setp.eq.b32 %p1, %r6, 1; @%p1 bra $END; {} shr.u32 %r5, %r5, 1; bra.uni $LOOP; $END:"
    )
    run(entry(body.format("") + store("b32", 2, 5), 2), (1,), [x, y])
    assert y.tolist() == [n // (n & -n) for n in range(1, 33)]
    with pytest.raises(Fault, match="needs all lanes of a warp"):
        run(entry(body.format("shfl.sync.bfly.b32 %r7, %r5, 1, 31, -1;"), 2), (1,), [x, y])


def test_no_programs() -> None:
    assert run(entry("", 0), (0, 4), []).programs == 0


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="takes 1 parameters, given are 2"):
        run(entry("", 1), (1,), [torch.zeros(1), 3])
    with pytest.raises(ValueError, match="order"):
        run(entry("", 0), (1,), [], order="sideways")


def test_the_same_program_for_two_architectures() -> None:
    text = entry("", 0)
    assert same_program(text) == same_program(text.replace("sm_80", "sm_89").replace("8.7", "8.8"))
    assert same_program(text) != same_program(text.replace("%tid.x", "%ctaid.x"))
