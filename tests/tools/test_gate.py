"""The reading of machine code, and what the gate objects to."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import machine_code
import roofline
from machine_code import NVIDIA

SASS = """
        .section  .text._decode_kernel,"ax",@progbits
_decode_kernel:
.text._decode_kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   S2R R0, SR_TID.X ;
        /*0020*/                   STL [R1], R0 ;
.L_x_1:
        /*0030*/                   LDGSTS.E.BYPASS.LTC128B.128 [R4], desc[UR6][R2.64], P0 ;
        /*0040*/              @!P1 LDGSTS.E.64 [R4+0x800], desc[UR6][R2.64] ;
        /*0050*/                   LOP3.LUT R8, R8, 0xf000f, R9, 0xea, !PT ;
        /*0060*/                   HMMA.16816.F32.BF16 R12, R8, R10, R12 ;
        /*0070*/                   HMMA.1688.F32 R12, R8, R10, R12 ;
        /*0080*/               @P0 BRA `(.L_x_1) ;
.L_x_2:
        /*0090*/                   HMMA.16816.F32.BF16 R12, R8, R10, R12 ;
        /*00a0*/                   HMMA.16816.F32.BF16 R12, R8, R10, R12 ;
        /*00b0*/              @!UP0 BRA `(.L_x_2) ;
        /*00c0*/                   LDG.E.128 R16, desc[UR6][R2.64] ;
.L_x_3:
        /*00d0*/                   BRA `(.L_x_3) ;
"""

AMDGCN = """
_decode_kernel:
	s_load_dwordx2 s[4:5], s[0:1], 0x0
.LBB0_1:                                ; =>This Inner Loop Header: Depth=1
	global_load_dwordx4 v[0:3], v[4:5], off
	v_and_or_b32 v0, v0, s2, v1
	v_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], v[0:3]
	s_cbranch_scc1 .LBB0_1
	s_endpgm
	.amdhsa_next_free_vgpr 8
amdhsa.kernels:
  - .agpr_count:     0
    .private_segment_fixed_size: 8
    .sgpr_spill_count: 0
    .vgpr_count:     96
    .vgpr_spill_count: 2
"""

ROW = {"variant": "decode int4 full", "arch": "sm_90", "spills": 0, "shared": 22080, "wide_loads": 16, "matrix": 64}
ROW |= {
    "instructions": {"matrix": 64},
    "bytes_per_element": 0.53125,
    "per_element": {"issue": 2.4, "integer": 1.1, "special": 0.1, "products": 8.0},
}


def test_main_loop_is_the_one_that_unpacks():
    loop = machine_code.main_loop(machine_code.parse(SASS, NVIDIA), NVIDIA)
    names = [instruction.name.split(".")[0] for instruction in loop]
    assert names == ["LDGSTS", "LDGSTS", "LOP3", "HMMA", "HMMA", "BRA"]


def test_kinds_of_instructions():
    kinds = machine_code.count(machine_code.parse(SASS, NVIDIA).instructions, NVIDIA)
    expected = {"matrix": 4, "uniform": 2, "copy": 2, "local": 1, "logic": 1, "global": 1, "control": 3}
    assert kinds == expected


def test_amd_kernel():
    code = machine_code.read_amd(AMDGCN)
    assert (code.registers, code.spills, code.wide_loads, code.matrix, code.products) == (96, 10, 1, 1, 16**3)
    assert code.instructions == {"global": 1, "logic": 1, "matrix": 1, "scalar": 1}


def test_kernel_without_a_loop_counts_as_a_whole():
    code = machine_code.read_amd(AMDGCN.replace("s_cbranch_scc1 .LBB0_1", "s_nop 0"))
    assert not code.has_loop
    assert code.instructions == {"scalar": 3, "global": 1, "logic": 1, "matrix": 1}


def test_instructions_per_element():
    used = roofline.per_element({"logic": 6, "special": 2, "matrix": 4}, products=2, elements=8)
    assert used == {"issue": 1.5, "integer": 0.75, "special": 0.25, "products": 0.25}


def test_bound_by_memory_where_instructions_fit_into_the_time_of_the_bytes():
    gpu = roofline.Gpu("sm_90", processors=100, gigahertz=1.0, terabytes=1.0, products=1024)  # 10 bytes per cycle
    assert roofline.bound(ROW, gpu) == (1.0, "memory")
    share, limit = roofline.bound(ROW, gpu._replace(terabytes=10.0))
    assert limit == "issue"
    assert share == pytest.approx(0.75 / (100 / 0.53125 * 2.4 / 128))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"spills": 3}, "3 spills"),
        ({"shared": 232449}, "232449 bytes of shared memory, of 232448"),
        ({"wide_loads": 0}, "no 16-byte loads"),
        ({"matrix": 0}, "no matrix instructions"),
        ({"variant": "combine d64"}, "64 matrix instructions"),
        ({"per_element": {"issue": 2.61}}, "2.61 instructions per element, of "),
        ({"variant": "decode int8", "per_element": {"issue": 2.21}}, "2.21 instructions per element, 2.0 in"),
        ({"variant": "decode new"}, "not in results/kernels.json"),
    ],
    ids=str,
)
def test_failures(change, reason):
    gate = pytest.importorskip("gate", exc_type=ImportError)
    results = [ROW, ROW | {"variant": "decode int8", "per_element": {"issue": 2.0}}]
    found = list(gate.failures(ROW | change, 227 * 1024, results))
    assert len(found) == (reason is not None)
    assert reason is None or found[0].startswith(reason)
