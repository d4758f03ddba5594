"""The printed split of every case: what was cut where, and why.

To accept a change on purpose: ``EXPECTTEST_ACCEPT=1 python -m pytest tests/passes/test_split.py``.
"""

import torch
from expecttest import TestCase
from lib.asserts import backend_for, build, split_texts
from lib.cases import CASES


class SplitSnapshots(TestCase):
    def setUp(self) -> None:
        torch._dynamo.reset()

    def check(self, name: str, expected: str) -> None:
        self.assertExpectedInline(split_texts(CASES[name]), expected, skip=1)

    def test_sdpa(self) -> None:
        self.check(
            "sdpa",
            """\
3 pieces: 2 captured, 1 eager; 3 distinct; 1280*s0 B cross
sizes: s0 = x.size()[0]
piece_0  captured  5 ops
  at   q, k, v = self.qkv(x).chunk(3, -1)
  in   s0, x f32[s0, 4, 16] 256*s0 B, 2 static 3264 B
  out  q f32[s0, 4, 16] 256*s0 of 768*s0 B, k f32[s0, 4, 16] 256*s0 of 768*s0 B, v f32[s0, 4, 16] 256*s0 of 768*s0 B
piece_1  eager     1 op
  why  splitting_op: torch.nn.functional.scaled_dot_product_attention [ALWAYS]
  at   return F.scaled_dot_product_attention(q, k, v)
  in   s0, q f32[s0, 4, 16] 256*s0 of 768*s0 B, k f32[s0, 4, 16] 256*s0 of 768*s0 B, v f32[s0, 4, 16] 256*s0 of 768*s0 B
  out  scaled_dot_product_attention f32[s0, 4, 16] 256*s0 B
piece_2  captured  2 ops
  at   return x + self.out(self.attend(q, k, v))
  in   s0, scaled_dot_product_attention f32[s0, 4, 16] 256*s0 B, x f32[s0, 4, 16] 256*s0 B, 2 static 1088 B
  out  add f32[s0, 4, 16] 256*s0 B""",
        )

    def test_sdpa_aten(self) -> None:
        self.check(
            "sdpa_aten",
            """\
3 pieces: 2 captured, 1 eager; 3 distinct; 1280*s0 B cross
sizes: s0 = x.size()[0]
piece_0  captured  5 ops
  at   q, k, v = self.qkv(x).chunk(3, -1)
  in   s0, x f32[s0, 4, 16] 256*s0 B, 2 static 3264 B
  out  q f32[s0, 4, 16] 256*s0 of 768*s0 B, k f32[s0, 4, 16] 256*s0 of 768*s0 B, v f32[s0, 4, 16] 256*s0 of 768*s0 B
piece_1  eager     1 op
  why  splitting_op: aten::scaled_dot_product_attention [ALWAYS]
  at   return torch.ops.aten.scaled_dot_product_attention(q, k, v)
  in   s0, q f32[s0, 4, 16] 256*s0 of 768*s0 B, k f32[s0, 4, 16] 256*s0 of 768*s0 B, v f32[s0, 4, 16] 256*s0 of 768*s0 B
  out  scaled_dot_product_attention f32[s0, 4, 16] 256*s0 B
piece_2  captured  2 ops
  at   return x + self.out(self.attend(q, k, v))
  in   s0, scaled_dot_product_attention f32[s0, 4, 16] 256*s0 B, x f32[s0, 4, 16] 256*s0 B, 2 static 1088 B
  out  add f32[s0, 4, 16] 256*s0 B""",
        )

    def test_multihead_attention(self) -> None:
        self.check(
            "multihead_attention",
            """\
3 pieces: 2 captured, 1 eager; 3 distinct; 768*s0 B cross
sizes: s0 = x.size()[0]
piece_0  captured  1 op
  at   x = self.norm(x)
  in   s0, x f32[s0, 4, 16] 256*s0 B, 2 static 128 B
  out  x_1 f32[s0, 4, 16] 256*s0 B
piece_1  eager     2 ops
  why  splitting_op: torch.nn.functional.multi_head_attention_forward [ALWAYS]
  at   return x + self.attention(x, x, x, need_weights=False)[0]
  in   s0, x_1 f32[s0, 4, 16] 256*s0 B, 4 static 4352 B
  out  attn_output f32[s0, 4, 16] 256*s0 B
piece_2  captured  1 op
  at   return x + self.attention(x, x, x, need_weights=False)[0]
  in   s0, x_1 f32[s0, 4, 16] 256*s0 B, attn_output f32[s0, 4, 16] 256*s0 B
  out  add f32[s0, 4, 16] 256*s0 B""",
        )

    def test_flex_attention(self) -> None:
        self.check(
            "flex_attention",
            """\
3 pieces: 2 captured, 1 eager; 3 distinct; 5120*s0 + 16 B cross
sizes: s0 = x.size()[0]
piece_0  captured  39 ops
  at   q, k, v = self.qkv(x).chunk(3, -1)
  in   s0, x f32[s0, 16, 16] 1024*s0 B, 2 static 3264 B
  out  q_1 f32[s0, 1, 16, 16] 1024*s0 of 3072*s0 B, k_1 f32[s0, 1, 16, 16] 1024*s0 of 3072*s0 B, v_1 f32[s0, 1, 16, 16] 1024*s0 of 3072*s0 B, child i32[1, 1, 1] 4 B, child_1 i32[1, 1, 1, 1] 4 B, q_num_blocks i32[1, 1, 1] 4 B, q_indices i32[1, 1, 1, 1] 4 B
piece_1  eager     2 ops, compiled on its own
  why  splitting_op: higher_order::flex_attention [ALWAYS]
  at   return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s * 2)[:, 0]
  in   s0, q_1 f32[s0, 1, 16, 16] 1024*s0 of 3072*s0 B, k_1 f32[s0, 1, 16, 16] 1024*s0 of 3072*s0 B, v_1 f32[s0, 1, 16, 16] 1024*s0 of 3072*s0 B, child i32[1, 1, 1] 4 B, child_1 i32[1, 1, 1, 1] 4 B, q_num_blocks i32[1, 1, 1] 4 B, q_indices i32[1, 1, 1, 1] 4 B
  out  out_1 f32[s0, 1, 16, 16] 1024*s0 B
piece_2  captured  3 ops
  at   return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s * 2)[:, 0]
  in   s0, out_1 f32[s0, 1, 16, 16] 1024*s0 B, x f32[s0, 16, 16] 1024*s0 B, 2 static 1088 B
  out  add f32[s0, 16, 16] 1024*s0 B""",
        )

    def test_flex_attention_mask_inside(self) -> None:
        self.check(
            "flex_attention_mask_inside",
            """\
3 pieces: 2 captured, 1 eager; 3 distinct; 5120*s0 + 32 B cross
sizes: s0 = x.size()[0]
piece_0  captured  111 ops
  at   q, k, v = self.qkv(x).chunk(3, -1)
  in   s0, x f32[s0, 16, 16] 1024*s0 B, 2 static 3264 B
  out  q_1 f32[s0, 1, 16, 16] 1024*s0 of 3072*s0 B, k_1 f32[s0, 1, 16, 16] 1024*s0 of 3072*s0 B, v_1 f32[s0, 1, 16, 16] 1024*s0 of 3072*s0 B, child_3 i32[1, 1, 1] 4 B, child_4 i32[1, 1, 1, 1] 4 B, child_7 i32[1, 1, 1] 4 B, child_8 i32[1, 1, 1, 1] 4 B, q_num_blocks i32[1, 1, 1] 4 B, q_indices i32[1, 1, 1, 1] 4 B, full_q_num_blocks i32[1, 1, 1] 4 B, full_q_indices i32[1, 1, 1, 1] 4 B
piece_1  eager     2 ops, compiled on its own
  why  splitting_op: higher_order::flex_attention [ALWAYS]
  at   return flex_attention(q, k, v, block_mask=mask)[:, 0]
  in   s0, q_1 f32[s0, 1, 16, 16] 1024*s0 of 3072*s0 B, k_1 f32[s0, 1, 16, 16] 1024*s0 of 3072*s0 B, v_1 f32[s0, 1, 16, 16] 1024*s0 of 3072*s0 B, child_3 i32[1, 1, 1] 4 B, child_4 i32[1, 1, 1, 1] 4 B, child_7 i32[1, 1, 1] 4 B, child_8 i32[1, 1, 1, 1] 4 B, q_num_blocks i32[1, 1, 1] 4 B, q_indices i32[1, 1, 1, 1] 4 B, full_q_num_blocks i32[1, 1, 1] 4 B, full_q_indices i32[1, 1, 1, 1] 4 B
  out  out_2 f32[s0, 1, 16, 16] 1024*s0 B
piece_2  captured  3 ops
  at   return flex_attention(q, k, v, block_mask=mask)[:, 0]
  in   s0, out_2 f32[s0, 1, 16, 16] 1024*s0 B, x f32[s0, 16, 16] 1024*s0 B, 2 static 1088 B
  out  add f32[s0, 16, 16] 1024*s0 B""",
        )

    def test_op_packet(self) -> None:
        self.check(
            "op_packet",
            """\
3 pieces: 2 captured, 1 eager; 3 distinct; 1280*s0 B cross
sizes: s0 = x.size()[0]
piece_0  captured  6 ops
  at   q, k, v = self.qkv(x).chunk(3, -1)
  in   s0, x f32[s0, 4, 16] 256*s0 B, 2 static 3264 B
  out  q f32[s0, 4, 16] 256*s0 of 768*s0 B, k f32[s0, 4, 16] 256*s0 of 768*s0 B, v f32[s0, 4, 16] 256*s0 of 768*s0 B, out f32[s0, 4, 16] 256*s0 B
piece_1  eager     1 op
  why  splitting_op: cgtest::attend [NEVER]
  at   torch.ops.cgtest.attend(q, k, v, out)
  in   s0, q f32[s0, 4, 16] 256*s0 of 768*s0 B, k f32[s0, 4, 16] 256*s0 of 768*s0 B, v f32[s0, 4, 16] 256*s0 of 768*s0 B, out f32[s0, 4, 16] 256*s0 B
  out  -
piece_2  captured  2 ops
  at   return x + self.out(self.attend(q, k, v))
  in   s0, out f32[s0, 4, 16] 256*s0 B, x f32[s0, 4, 16] 256*s0 B, 2 static 1088 B
  out  add f32[s0, 4, 16] 256*s0 B""",
        )

    def test_op_overload(self) -> None:
        self.check(
            "op_overload",
            """\
3 pieces: 2 captured, 1 eager; 3 distinct; 1536*s0 B cross
sizes: s0 = x.size()[0]
piece_0  captured  8 ops
  at   q, k, v = self.qkv(x).chunk(3, -1)
  in   s0, x f32[s0, 4, 16] 256*s0 B, 2 static 3264 B
  out  q f32[s0, 4, 16] 256*s0 of 768*s0 B, k f32[s0, 4, 16] 256*s0 of 768*s0 B, v f32[s0, 4, 16] 256*s0 of 768*s0 B, out f32[s0, 4, 16] 256*s0 B, first f32[s0, 4, 16] 256*s0 B
piece_1  eager     1 op
  why  splitting_op: cgtest::attend.scaled [NEVER]
  at   torch.ops.cgtest.attend.scaled(q, k, v, out, 0.5)
  in   s0, q f32[s0, 4, 16] 256*s0 of 768*s0 B, k f32[s0, 4, 16] 256*s0 of 768*s0 B, v f32[s0, 4, 16] 256*s0 of 768*s0 B, out f32[s0, 4, 16] 256*s0 B
  out  -
piece_2  captured  3 ops
  at   return out + first
  in   s0, out f32[s0, 4, 16] 256*s0 B, first f32[s0, 4, 16] 256*s0 B, x f32[s0, 4, 16] 256*s0 B, 2 static 1088 B
  out  add_1 f32[s0, 4, 16] 256*s0 B""",
        )

    def test_custom_op_function(self) -> None:
        self.check(
            "custom_op_function",
            """\
3 pieces: 2 captured, 1 eager; 3 distinct; 1152*s0 B cross
sizes: s0 = x.size()[0]
piece_0  captured  7 ops
  at   q, k, v = self.qkv(x).chunk(3, -1)
  in   s0, x f32[s0, 4, 16] 256*s0 B, 2 static 3264 B
  out  v f32[s0, 4, 16] 256*s0 of 768*s0 B, matmul f32[s0, 4, 4] 64*s0 B
piece_1  eager     1 op
  why  splitting_op: cgtest::soft [NEVER]
  at   return soft(q @ k.transpose(-1, -2)) @ v
  in   s0, matmul f32[s0, 4, 4] 64*s0 B
  out  soft_default f32[s0, 4, 4] 64*s0 B
piece_2  captured  3 ops
  at   return soft(q @ k.transpose(-1, -2)) @ v
  in   s0, soft_default f32[s0, 4, 4] 64*s0 B, v f32[s0, 4, 16] 256*s0 of 768*s0 B, x f32[s0, 4, 16] 256*s0 B, 2 static 1088 B
  out  add f32[s0, 4, 16] 256*s0 B""",
        )

    def test_tagged_op(self) -> None:
        self.check(
            "tagged_op",
            """\
3 pieces: 2 captured, 1 eager; 3 distinct; 1280*s0 B cross
sizes: s0 = x.size()[0]
piece_0  captured  5 ops
  at   q, k, v = self.qkv(x).chunk(3, -1)
  in   s0, x f32[s0, 4, 16] 256*s0 B, 2 static 3264 B
  out  q f32[s0, 4, 16] 256*s0 of 768*s0 B, k f32[s0, 4, 16] 256*s0 of 768*s0 B, v f32[s0, 4, 16] 256*s0 of 768*s0 B
piece_1  eager     1 op
  why  splitting_op: cgtest::unsafe (tag cudagraph_unsafe) [NEVER]
  at   return torch.ops.cgtest.unsafe(q) + k * v
  in   s0, q f32[s0, 4, 16] 256*s0 of 768*s0 B
  out  unsafe f32[s0, 4, 16] 256*s0 B
piece_2  captured  4 ops
  at   return torch.ops.cgtest.unsafe(q) + k * v
  in   s0, k f32[s0, 4, 16] 256*s0 of 768*s0 B, v f32[s0, 4, 16] 256*s0 of 768*s0 B, unsafe f32[s0, 4, 16] 256*s0 B, x f32[s0, 4, 16] 256*s0 B, 2 static 1088 B
  out  add_1 f32[s0, 4, 16] 256*s0 B""",
        )

    def test_predicate(self) -> None:
        self.check(
            "predicate",
            """\
3 pieces: 2 captured, 1 eager; 3 distinct; 1152*s0 B cross
sizes: s0 = x.size()[0]
piece_0  captured  7 ops
  at   q, k, v = self.qkv(x).chunk(3, -1)
  in   s0, x f32[s0, 4, 16] 256*s0 B, 2 static 3264 B
  out  v f32[s0, 4, 16] 256*s0 of 768*s0 B, matmul f32[s0, 4, 4] 64*s0 B
piece_1  eager     1 op
  why  splitting_op: softmax [NEVER]
  at   return F.softmax(q @ k.transpose(-1, -2), dim=-1) @ v
  in   s0, matmul f32[s0, 4, 4] 64*s0 B
  out  softmax f32[s0, 4, 4] 64*s0 B
piece_2  captured  3 ops
  at   return F.softmax(q @ k.transpose(-1, -2), dim=-1) @ v
  in   s0, softmax f32[s0, 4, 4] 64*s0 B, v f32[s0, 4, 16] 256*s0 of 768*s0 B, x f32[s0, 4, 16] 256*s0 B, 2 static 1088 B
  out  add f32[s0, 4, 16] 256*s0 B""",
        )

    def test_eager_region(self) -> None:
        self.check(
            "eager_region",
            """\
3 pieces: 2 captured, 1 eager; 3 distinct; 1280*s0 B cross
sizes: s0 = x.size()[0]
piece_0  captured  5 ops
  at   q, k, v = self.qkv(x).chunk(3, -1)
  in   s0, x f32[s0, 4, 16] 256*s0 B, 2 static 3264 B
  out  q f32[s0, 4, 16] 256*s0 of 768*s0 B, k f32[s0, 4, 16] 256*s0 of 768*s0 B, v f32[s0, 4, 16] 256*s0 of 768*s0 B
piece_1  eager     4 ops
  why  eager_region: cgcompile.eager_region()
  at   scores = torch.softmax(q @ k.transpose(-1, -2), -1)
  at   mixed = scores @ v
  in   s0, k f32[s0, 4, 16] 256*s0 of 768*s0 B, q f32[s0, 4, 16] 256*s0 of 768*s0 B, v f32[s0, 4, 16] 256*s0 of 768*s0 B
  out  mixed f32[s0, 4, 16] 256*s0 B
piece_2  captured  2 ops
  at   return x + self.out(self.attend(q, k, v))
  in   s0, mixed f32[s0, 4, 16] 256*s0 B, x f32[s0, 4, 16] 256*s0 B, 2 static 1088 B
  out  add f32[s0, 4, 16] 256*s0 B""",
        )

    def test_vmap_sdpa(self) -> None:
        self.check(
            "vmap_sdpa",
            """\
3 pieces: 2 captured, 1 eager; 3 distinct; 1280*s0 B cross
sizes: s0 = x.size()[0]
piece_0  captured  5 ops
  at   q, k, v = self.qkv(x).chunk(3, -1)
  in   s0, x f32[s0, 4, 16] 256*s0 B, 2 static 3264 B
  out  q f32[s0, 4, 16] 256*s0 of 768*s0 B, k f32[s0, 4, 16] 256*s0 of 768*s0 B, v f32[s0, 4, 16] 256*s0 of 768*s0 B
piece_1  eager     8 ops
  why  splitting_op: torch.nn.functional.scaled_dot_product_attention [ALWAYS]
  why  state_region: in one torch.vmap region with torch.nn.functional.scaled_dot_product_attention [ALWAYS]
  at   return torch.vmap(F.scaled_dot_product_attention)(q, k, v)
  in   s0, q f32[s0, 4, 16] 256*s0 of 768*s0 B, k f32[s0, 4, 16] 256*s0 of 768*s0 B, v f32[s0, 4, 16] 256*s0 of 768*s0 B
  out  remove_batch_dim f32[s0, 4, 16] 256*s0 B
piece_2  captured  2 ops
  at   return x + self.out(self.attend(q, k, v))
  in   s0, remove_batch_dim f32[s0, 4, 16] 256*s0 B, x f32[s0, 4, 16] 256*s0 B, 2 static 1088 B
  out  add f32[s0, 4, 16] 256*s0 B""",
        )

    def test_vmap_without_boundary(self) -> None:
        self.check(
            "vmap_without_boundary",
            """\
3 pieces: 2 captured, 1 eager; 3 distinct; 1536*s0 B cross
sizes: s0 = x.size()[0]
piece_0  captured  13 ops
  at   q, k, v = self.qkv(x).chunk(3, -1)
  in   s0, x f32[s0, 4, 16] 256*s0 B, 2 static 3264 B
  out  k f32[s0, 4, 16] 256*s0 of 768*s0 B, v f32[s0, 4, 16] 256*s0 of 768*s0 B, q_1 f32[s0, 4, 16] 256*s0 B
piece_1  eager     1 op
  why  splitting_op: torch.nn.functional.scaled_dot_product_attention [ALWAYS]
  at   return F.scaled_dot_product_attention(q, k, v)
  in   s0, q_1 f32[s0, 4, 16] 256*s0 B, k f32[s0, 4, 16] 256*s0 of 768*s0 B, v f32[s0, 4, 16] 256*s0 of 768*s0 B
  out  scaled_dot_product_attention f32[s0, 4, 16] 256*s0 B
piece_2  captured  2 ops
  at   return x + self.out(self.attend(q, k, v))
  in   s0, scaled_dot_product_attention f32[s0, 4, 16] 256*s0 B, x f32[s0, 4, 16] 256*s0 B, 2 static 1088 B
  out  add f32[s0, 4, 16] 256*s0 B""",
        )

    def test_size_crosses(self) -> None:
        self.check(
            "size_crosses",
            """\
3 pieces: 2 captured, 1 eager; 3 distinct; 1280*s0 B cross
sizes: s0 = x.size()[0]
piece_0  captured  8 ops
  at   q, k, v = self.qkv(x).chunk(3, -1)
  in   s0, x f32[s0, 4, 16] 256*s0 B, 2 static 3264 B
  out  q_1 f32[4*s0, 1, 16] 256*s0 of 768*s0 B, k_1 f32[4*s0, 1, 16] 256*s0 of 768*s0 B, v_1 f32[4*s0, 1, 16] 256*s0 of 768*s0 B
piece_1  eager     1 op
  why  splitting_op: torch.nn.functional.scaled_dot_product_attention [ALWAYS]
  at   out = F.scaled_dot_product_attention(q, k, v)
  in   s0, q_1 f32[4*s0, 1, 16] 256*s0 of 768*s0 B, k_1 f32[4*s0, 1, 16] 256*s0 of 768*s0 B, v_1 f32[4*s0, 1, 16] 256*s0 of 768*s0 B
  out  out f32[4*s0, 1, 16] 256*s0 B
piece_2  captured  4 ops
  at   return out.view(size) * (n // 2 + 1)
  in   s0, out f32[4*s0, 1, 16] 256*s0 B, x f32[s0, 4, 16] 256*s0 B, 2 static 1088 B
  out  add_1 f32[s0, 4, 16] 256*s0 B""",
        )

    def test_size_returned(self) -> None:
        self.check(
            "size_returned",
            """\
3 pieces: 2 captured, 1 eager; 3 distinct; 1280*s0 B cross
sizes: s0 = x.size()[0]
piece_0  captured  5 ops
  at   q, k, v = self.qkv(x).chunk(3, -1)
  in   s0, x f32[s0, 4, 16] 256*s0 B, 2 static 3264 B
  out  q f32[s0, 4, 16] 256*s0 of 768*s0 B, k f32[s0, 4, 16] 256*s0 of 768*s0 B, v f32[s0, 4, 16] 256*s0 of 768*s0 B
piece_1  eager     1 op
  why  splitting_op: torch.nn.functional.scaled_dot_product_attention [ALWAYS]
  at   return F.scaled_dot_product_attention(q, k, v)
  in   s0, q f32[s0, 4, 16] 256*s0 of 768*s0 B, k f32[s0, 4, 16] 256*s0 of 768*s0 B, v f32[s0, 4, 16] 256*s0 of 768*s0 B
  out  scaled_dot_product_attention f32[s0, 4, 16] 256*s0 B
piece_2  captured  2 ops
  at   return x + self.out(self.attend(q, k, v))
  in   s0, scaled_dot_product_attention f32[s0, 4, 16] 256*s0 B, x f32[s0, 4, 16] 256*s0 B, 2 static 1088 B
  out  y f32[s0, 4, 16] 256*s0 B
sizes returned: mul""",
        )

    def test_items_cross(self) -> None:
        self.check(
            "items_cross",
            """\
3 pieces: 2 captured, 1 eager; 3 distinct; 816*s0 B cross
sizes: s0 = x.size()[0]
piece_0  captured  12 ops
  at   a, b = x.sin().chunk(2, -1)
  in   s0, x f32[s0, 4, 16] 256*s0 B
  out  a f32[s0, 4, 8] 128*s0 of 256*s0 B, b f32[s0, 4, 8] 128*s0 of 256*s0 B, c f32[s0, 4, 4] 64*s0 of 256*s0 B, d f32[s0, 4, 4] 64*s0 of 256*s0 B, e f32[s0, 4, 8] 128*s0 of 256*s0 B, getitem_5 f32[s0, 4, 2] 32*s0 B
piece_1  eager     1 op
  why  splitting_op: torch.nn.functional.scaled_dot_product_attention [ALWAYS]
  at   y = F.scaled_dot_product_attention(x, x, x)
  in   s0, x f32[s0, 4, 16] 256*s0 B
  out  y f32[s0, 4, 16] 256*s0 B
piece_2  captured  13 ops
  at   y.sum(-1) + a.sum(-1) * b.sum(-1) + c.sum(-1) + d.sum(-1) * e.sum(-1) + top[0][..., 0]
  in   s0, y f32[s0, 4, 16] 256*s0 B, a f32[s0, 4, 8] 128*s0 of 256*s0 B, b f32[s0, 4, 8] 128*s0 of 256*s0 B, c f32[s0, 4, 4] 64*s0 of 256*s0 B, d f32[s0, 4, 4] 64*s0 of 256*s0 B, e f32[s0, 4, 8] 128*s0 of 256*s0 B, getitem_5 f32[s0, 4, 2] 32*s0 B
  out  add_3 f32[s0, 4] 16*s0 B""",
        )

    def test_view_mutated_in_another_piece(self) -> None:
        self.check(
            "view_mutated_in_another_piece",
            """\
3 pieces: 2 captured, 1 eager; 3 distinct; 1024*s0 B cross
sizes: s0 = x.size()[0]
piece_0  captured  1 op
  at   h = x * 2
  in   s0, x f32[s0, 4, 16] 256*s0 B
  out  h f32[s0, 4, 16] 256*s0 B
piece_1  eager     1 op
  why  splitting_op: torch.nn.functional.scaled_dot_product_attention [ALWAYS]
  at   y = F.scaled_dot_product_attention(x, x, x)
  in   s0, x f32[s0, 4, 16] 256*s0 B
  out  y f32[s0, 4, 16] 256*s0 B
piece_2  captured  4 ops
  at   v = h.view(h.shape[0], -1)
  in   s0, h f32[s0, 4, 16] 256*s0 B, y f32[s0, 4, 16] 256*s0 B
  out  add_1 f32[s0, 4, 16] 256*s0 B, mul_1 f32[s0, 64] 256*s0 B""",
        )

    def test_base_mutated_view_read(self) -> None:
        self.check(
            "base_mutated_view_read",
            """\
3 pieces: 2 captured, 1 eager; 3 distinct; 704*s0 B cross
sizes: s0 = x.size()[0]
piece_0  captured  1 op
  at   h = x * 2
  in   s0, x f32[s0, 4, 16] 256*s0 B
  out  h f32[s0, 4, 16] 256*s0 B
piece_1  eager     1 op
  why  splitting_op: torch.nn.functional.scaled_dot_product_attention [ALWAYS]
  at   y = F.scaled_dot_product_attention(x, x, x)
  in   s0, x f32[s0, 4, 16] 256*s0 B
  out  y f32[s0, 4, 16] 256*s0 B
piece_2  captured  4 ops
  at   h.mul_(3)
  in   s0, h f32[s0, 4, 16] 256*s0 B, y f32[s0, 4, 16] 256*s0 B
  out  add f32[s0, 3, 16] 192*s0 B""",
        )

    def test_base_mutated_by_boundary(self) -> None:
        self.check(
            "base_mutated_by_boundary",
            """\
3 pieces: 2 captured, 1 eager; 3 distinct; 768*s0 B cross
sizes: s0 = x.size()[0]
piece_0  captured  1 op
  at   h = x + 1
  in   s0, x f32[s0, 4, 16] 256*s0 B
  out  h f32[s0, 4, 16] 256*s0 B
piece_1  eager     1 op
  why  splitting_op: cgtest::scale_ [NEVER]
  at   torch.ops.cgtest.scale_(h, 3.0)
  in   s0, h f32[s0, 4, 16] 256*s0 B
  out  -
piece_2  captured  4 ops
  at   v = h.transpose(1, 2)
  in   s0, h f32[s0, 4, 16] 256*s0 B
  out  add_1 f32[s0, 16, 4] 256*s0 B, sin f32[s0, 4, 16] 256*s0 B""",
        )

    def test_input_mutated_in_pieces(self) -> None:
        self.check(
            "input_mutated_in_pieces",
            """\
3 pieces: 2 captured, 1 eager; 3 distinct; 512*s0 B cross
sizes: s0 = cache.size()[0]
piece_0  captured  3 ops
  at   cache[:, 0].add_(x[:, 0])
  in   s0, cache f32[s0, 4, 16] 256*s0 B, x f32[s0, 4, 16] 256*s0 B
  out  -
piece_1  eager     1 op
  why  splitting_op: torch.nn.functional.scaled_dot_product_attention [ALWAYS]
  at   y = F.scaled_dot_product_attention(x, x, x)
  in   s0, x f32[s0, 4, 16] 256*s0 B
  out  y f32[s0, 4, 16] 256*s0 B
piece_2  captured  3 ops
  at   cache.mul_(y.mean())
  in   s0, y f32[s0, 4, 16] 256*s0 B, cache f32[s0, 4, 16] 256*s0 B
  out  add_1 f32[s0, 4, 16] 256*s0 B""",
        )

    def test_constants(self) -> None:
        self.check(
            "constants",
            """\
3 pieces: 2 captured, 1 eager; 3 distinct; 1536*s0 B cross
sizes: s0 = x.size()[0]
piece_0  captured  8 ops
  at   q, k, v = self.qkv(x).chunk(3, -1)
  in   s0, x f32[s0, 4, 16] 256*s0 B, 2 static 3264 B
  out  k f32[s0, 4, 16] 256*s0 of 768*s0 B, v f32[s0, 4, 16] 256*s0 of 768*s0 B, add f32[s0, 4, 16] 256*s0 B
piece_1  eager     1 op
  why  splitting_op: torch.nn.functional.scaled_dot_product_attention [ALWAYS]
  at   return F.scaled_dot_product_attention(q + weights, k, v) + self.shift
  in   s0, add f32[s0, 4, 16] 256*s0 B, k f32[s0, 4, 16] 256*s0 of 768*s0 B, v f32[s0, 4, 16] 256*s0 of 768*s0 B
  out  scaled_dot_product_attention f32[s0, 4, 16] 256*s0 B
piece_2  captured  3 ops
  at   return F.scaled_dot_product_attention(q + weights, k, v) + self.shift
  in   s0, scaled_dot_product_attention f32[s0, 4, 16] 256*s0 B, x f32[s0, 4, 16] 256*s0 B, 3 static 1152 B
  out  add_2 f32[s0, 4, 16] 256*s0 B""",
        )

    def test_autocast(self) -> None:
        self.check(
            "autocast",
            """\
3 pieces: 2 captured, 1 eager; 3 distinct; 768*s0 B cross
sizes: s0 = x.size()[0]
piece_0  captured  6 ops
  at   q, k, v = self.qkv(x).chunk(3, -1)
  in   s0, x f32[s0, 4, 16] 256*s0 B, 2 static 3264 B
  out  q bf16[s0, 4, 16] 128*s0 of 384*s0 B, k bf16[s0, 4, 16] 128*s0 of 384*s0 B, v bf16[s0, 4, 16] 128*s0 of 384*s0 B
piece_1  eager     1 op
  why  splitting_op: torch.nn.functional.scaled_dot_product_attention [ALWAYS]
  at   return F.scaled_dot_product_attention(q, k, v)
  in   s0, q bf16[s0, 4, 16] 128*s0 of 384*s0 B, k bf16[s0, 4, 16] 128*s0 of 384*s0 B, v bf16[s0, 4, 16] 128*s0 of 384*s0 B
  out  scaled_dot_product_attention bf16[s0, 4, 16] 128*s0 B
piece_2  captured  3 ops
  at   return x + self.out(self.attend(q, k, v))
  in   s0, scaled_dot_product_attention bf16[s0, 4, 16] 128*s0 B, x f32[s0, 4, 16] 256*s0 B, 2 static 1088 B
  out  add f32[s0, 4, 16] 256*s0 B""",
        )

    def test_grad_mode(self) -> None:
        self.check(
            "grad_mode",
            """\
3 pieces: 2 captured, 1 eager; 3 distinct; 1280*s0 B cross
sizes: s0 = x.size()[0]
piece_0  captured  5 ops
  at   q, k, v = self.qkv(x).chunk(3, -1)
  in   s0, x f32[s0, 4, 16] 256*s0 B, 2 static 3264 B
  out  q f32[s0, 4, 16] 256*s0 of 768*s0 B, k f32[s0, 4, 16] 256*s0 of 768*s0 B, v f32[s0, 4, 16] 256*s0 of 768*s0 B
piece_1  eager     1 op
  why  splitting_op: torch.nn.functional.scaled_dot_product_attention [ALWAYS]
  at   out = F.scaled_dot_product_attention(q, k, v) * 2
  in   s0, q f32[s0, 4, 16] 256*s0 of 768*s0 B, k f32[s0, 4, 16] 256*s0 of 768*s0 B, v f32[s0, 4, 16] 256*s0 of 768*s0 B
  out  scaled_dot_product_attention f32[s0, 4, 16] 256*s0 B
piece_2  captured  4 ops
  at   out = F.scaled_dot_product_attention(q, k, v) * 2
  in   s0, scaled_dot_product_attention f32[s0, 4, 16] 256*s0 B, x f32[s0, 4, 16] 256*s0 B, 2 static 1088 B
  out  add_1 f32[s0, 4, 16] 256*s0 B""",
        )

    def test_enable_grad_region(self) -> None:
        self.check(
            "enable_grad_region",
            """\
3 pieces: 2 captured, 1 eager; 3 distinct; 1280*s0 B cross
sizes: s0 = x.size()[0]
piece_0  captured  5 ops
  at   q, k, v = self.qkv(x).chunk(3, -1)
  in   s0, x f32[s0, 4, 16] 256*s0 B, 2 static 3264 B
  out  q f32[s0, 4, 16] 256*s0 of 768*s0 B, k f32[s0, 4, 16] 256*s0 of 768*s0 B, v f32[s0, 4, 16] 256*s0 of 768*s0 B
piece_1  eager     5 ops
  why  gradients: in one torch.enable_grad region
  why  splitting_op: torch.nn.functional.scaled_dot_product_attention [ALWAYS]
  at   q = q * 2 + 1
  at   return F.scaled_dot_product_attention(q, k, v)
  in   s0, q f32[s0, 4, 16] 256*s0 of 768*s0 B, k f32[s0, 4, 16] 256*s0 of 768*s0 B, v f32[s0, 4, 16] 256*s0 of 768*s0 B
  out  scaled_dot_product_attention f32[s0, 4, 16] 256*s0 B
piece_2  captured  2 ops
  at   return x + self.out(self.attend(q, k, v))
  in   s0, scaled_dot_product_attention f32[s0, 4, 16] 256*s0 B, x f32[s0, 4, 16] 256*s0 B, 2 static 1088 B
  out  add_1 f32[s0, 4, 16] 256*s0 B""",
        )

    def test_cond(self) -> None:
        self.check(
            "cond",
            """\
3 pieces: 2 captured, 1 eager; 3 distinct; 1024*s0 + 1 B cross
sizes: s0 = x.size()[0]
piece_0  captured  8 ops
  at   q, k, v = self.qkv(x).chunk(3, -1)
  in   s0, x f32[s0, 4, 16] 256*s0 B, 2 static 3264 B
  out  gt b8[] 1 B, sin f32[s0, 4, 16] 256*s0 B, cos f32[s0, 4, 16] 256*s0 B
piece_1  eager     2 ops
  why  host_sync: torch.cond picks its branch on the host
  at   return torch.cond(q.sum() > 0, lambda a, b: a + b, lambda a, b: a - b, (q.sin(), v.cos()))
  in   s0, gt b8[] 1 B, cos f32[s0, 4, 16] 256*s0 B, sin f32[s0, 4, 16] 256*s0 B
  out  getitem_3 f32[s0, 4, 16] 256*s0 B
piece_2  captured  2 ops
  at   return x + self.out(self.attend(q, k, v))
  in   s0, getitem_3 f32[s0, 4, 16] 256*s0 B, x f32[s0, 4, 16] 256*s0 B, 2 static 1088 B
  out  add f32[s0, 4, 16] 256*s0 B""",
        )

    def test_random(self) -> None:
        self.check(
            "random",
            """\
3 pieces: 2 captured, 1 eager; 3 distinct; 1536*s0 B cross
sizes: s0 = x.size()[0]
piece_0  captured  6 ops
  at   q, k, v = self.qkv(x).chunk(3, -1)
  in   s0, x f32[s0, 4, 16] 256*s0 B, 2 static 3264 B
  out  k f32[s0, 4, 16] 256*s0 of 768*s0 B, v f32[s0, 4, 16] 256*s0 of 768*s0 B, q_1 f32[s0, 4, 16] 256*s0 B
piece_1  eager     1 op
  why  splitting_op: torch.nn.functional.scaled_dot_product_attention [ALWAYS]
  at   return F.scaled_dot_product_attention(q, k, v) + torch.rand_like(v)
  in   s0, q_1 f32[s0, 4, 16] 256*s0 B, k f32[s0, 4, 16] 256*s0 of 768*s0 B, v f32[s0, 4, 16] 256*s0 of 768*s0 B
  out  scaled_dot_product_attention f32[s0, 4, 16] 256*s0 B
piece_2  captured  4 ops
  at   return F.scaled_dot_product_attention(q, k, v) + torch.rand_like(v)
  in   s0, v f32[s0, 4, 16] 256*s0 of 768*s0 B, scaled_dot_product_attention f32[s0, 4, 16] 256*s0 B, x f32[s0, 4, 16] 256*s0 B, 2 static 1088 B
  out  add_1 f32[s0, 4, 16] 256*s0 B""",
        )

    def test_nonzero(self) -> None:
        self.check(
            "nonzero",
            """\
7 pieces: 4 captured, 3 eager; 7 distinct; 1600*s0 + 12*u0 + 4 B cross
sizes: s0 = x.size()[0]
piece_0  captured  7 ops
  at   q, k, v = self.qkv(x).chunk(3, -1)
  in   s0, x f32[s0, 4, 16] 256*s0 B, 2 static 3264 B
  out  q f32[s0, 4, 16] 256*s0 of 768*s0 B, v f32[s0, 4, 16] 256*s0 of 768*s0 B, flatten b8[64*s0] 64*s0 B
piece_1  eager     5 ops
  why  host_sync: the size or value of nonzero depends on data
  why  unbacked_size: works on a size or number that depends on data
  at   rows = (k > 0).flatten().nonzero()[:, 0]
  in   s0, flatten b8[64*s0] 64*s0 B
  out  rows i64[u0] 8*u0 B
piece_2  captured  1 op
  at   picked = v.flatten()[rows].sin()
  in   s0, v f32[s0, 4, 16] 256*s0 of 768*s0 B
  out  flatten_1 f32[64*s0] 256*s0 B
piece_3  eager     2 ops
  why  unbacked_size: works on a size or number that depends on data
  at   picked = v.flatten()[rows].sin()
  in   s0, flatten_1 f32[64*s0] 256*s0 B, rows i64[u0] 8*u0 B
  out  picked f32[u0] 4*u0 B
piece_4  captured  1 op
  at   return q.cos() + picked.sum()
  in   s0, q f32[s0, 4, 16] 256*s0 of 768*s0 B
  out  cos f32[s0, 4, 16] 256*s0 B
piece_5  eager     1 op
  why  unbacked_size: works on a size or number that depends on data
  at   return q.cos() + picked.sum()
  in   picked f32[u0] 4*u0 B
  out  sum_1 f32[] 4 B
piece_6  captured  3 ops
  at   return q.cos() + picked.sum()
  in   s0, cos f32[s0, 4, 16] 256*s0 B, sum_1 f32[] 4 B, x f32[s0, 4, 16] 256*s0 B, 2 static 1088 B
  out  add_1 f32[s0, 4, 16] 256*s0 B""",
        )

    def test_item(self) -> None:
        self.check(
            "item",
            """\
3 pieces: 2 captured, 1 eager; 3 distinct; 1536*s0 + 4 B cross
sizes: s0 = x.size()[0]
piece_0  captured  7 ops
  at   q, k, v = self.qkv(x).chunk(3, -1)
  in   s0, x f32[s0, 4, 16] 256*s0 B, 2 static 3264 B
  out  v f32[s0, 4, 16] 256*s0 of 768*s0 B, sin f32[s0, 4, 16] 256*s0 B, mean f32[] 4 B
piece_1  eager     2 ops
  why  host_sync: the size or value of item depends on data
  why  unbacked_size: works on a size or number that depends on data
  at   return q.sin() * k.mean().item() + v
  in   s0, mean f32[] 4 B, sin f32[s0, 4, 16] 256*s0 B
  out  mul f32[s0, 4, 16] 256*s0 B
piece_2  captured  3 ops
  at   return q.sin() * k.mean().item() + v
  in   s0, mul f32[s0, 4, 16] 256*s0 B, v f32[s0, 4, 16] 256*s0 of 768*s0 B, x f32[s0, 4, 16] 256*s0 B, 2 static 1088 B
  out  add_1 f32[s0, 4, 16] 256*s0 B""",
        )

    def test_masked_assignment(self) -> None:
        self.check(
            "masked_assignment",
            """\
1 piece: 1 captured, 0 eager; 1 distinct; 256*s0 B cross
sizes: s0 = x.size()[0]
piece_0  captured  11 ops
  at   q, k, v = self.qkv(x).chunk(3, -1)
  in   s0, x f32[s0, 4, 16] 256*s0 B, 4 static 4352 B
  out  add_1 f32[s0, 4, 16] 256*s0 B""",
        )

    def test_mask_assigns_values(self) -> None:
        self.check(
            "mask_assigns_values",
            """\
3 pieces: 2 captured, 1 eager; 3 distinct; 1344*s0 B cross
sizes: s0 = x.size()[0]
piece_0  captured  7 ops
  at   q, k, v = self.qkv(x).chunk(3, -1)
  in   s0, x f32[s0, 4, 16] 256*s0 B, 2 static 3264 B
  out  v f32[s0, 4, 16] 256*s0 of 768*s0 B, q_1 f32[s0, 4, 16] 256*s0 B, mask b8[s0, 4, 16] 64*s0 B
piece_1  eager     5 ops
  why  host_sync: the size or value of _operator.getitem depends on data
  why  unbacked_size: works on a size or number that depends on data
  at   q[mask] = v[mask]
  in   s0, v f32[s0, 4, 16] 256*s0 of 768*s0 B, mask b8[s0, 4, 16] 64*s0 B, q_1 f32[s0, 4, 16] 256*s0 B
  out  -
piece_2  captured  3 ops
  at   return q.sin()
  in   s0, q_1 f32[s0, 4, 16] 256*s0 B, x f32[s0, 4, 16] 256*s0 B, 2 static 1088 B
  out  add f32[s0, 4, 16] 256*s0 B""",
        )

    def test_graph_break(self) -> None:
        self.check(
            "graph_break",
            """\
1 piece: 1 captured, 0 eager; 1 distinct; 4608 B cross
piece_0  captured  5 ops
  at   q, k, v = self.qkv(x).chunk(3, -1)
  in   x f32[6, 4, 16] 1536 B, 2 static 3264 B
  out  q f32[6, 4, 16] 1536 of 4608 B, k f32[6, 4, 16] 1536 of 4608 B, v f32[6, 4, 16] 1536 of 4608 B
ended by a graph break: ...

1 piece: 0 captured, 1 eager; 1 distinct; 1536 B cross
piece_0  eager     1 op
  why  splitting_op: torch.nn.functional.scaled_dot_product_attention [ALWAYS]
  at   return F.scaled_dot_product_attention(q, k, v)
  in   q f32[6, 4, 16] 1536 of 4608 B, k f32[6, 4, 16] 1536 of 4608 B, v f32[6, 4, 16] 1536 of 4608 B
  out  scaled_dot_product_attention f32[6, 4, 16] 1536 B

1 piece: 1 captured, 0 eager; 1 distinct; 1536 B cross
piece_0  captured  2 ops
  at   return x + self.out(self.attend(q, k, v))
  in   stack2 f32[6, 4, 16] 1536 B, stack0 f32[6, 4, 16] 1536 B, 2 static 1088 B
  out  add f32[6, 4, 16] 1536 B""",
        )

    def test_no_boundary(self) -> None:
        self.check(
            "no_boundary",
            """\
1 piece: 1 captured, 0 eager; 1 distinct; 256*s0 B cross
sizes: s0 = x.size()[0]
piece_0  captured  4 ops
  at   return x + self.down(F.gelu(self.up(x)))
  in   s0, x f32[s0, 4, 16] 256*s0 B, 4 static 4288 B
  out  add f32[s0, 4, 16] 256*s0 B""",
        )

    def test_only_views(self) -> None:
        self.check(
            "only_views",
            """\
1 piece: 0 captured, 1 eager; 1 distinct; 256*s0 B cross
sizes: s0 = x.size()[0]
piece_0  eager     2 ops
  why  no_kernel: launches no kernel
  at   return x.transpose(1, 2).unsqueeze(0)
  in   s0, x f32[s0, 4, 16] 256*s0 B
  out  unsqueeze f32[1, s0, 16, 4] 256*s0 B""",
        )

    def test_neighbours(self) -> None:
        self.check(
            "neighbours",
            """\
3 pieces: 2 captured, 1 eager; 3 distinct; 768*s0 B cross
sizes: s0 = x.size()[0]
piece_0  captured  1 op
  at   h = x.sin()
  in   s0, x f32[s0, 4, 16] 256*s0 B
  out  h f32[s0, 4, 16] 256*s0 B
piece_1  eager     5 ops
  why  splitting_op: torch.nn.functional.scaled_dot_product_attention [ALWAYS]
  at   a = F.scaled_dot_product_attention(h, h, h)
  at   b = F.scaled_dot_product_attention(a.transpose(1, 2), h.transpose(1, 2), h.transpose(1, 2))
  in   s0, h f32[s0, 4, 16] 256*s0 B
  out  b f32[s0, 16, 4] 256*s0 B
piece_2  captured  1 op
  at   return b.cos()
  in   s0, b f32[s0, 16, 4] 256*s0 B
  out  cos f32[s0, 16, 4] 256*s0 B""",
        )

    def test_boundary_first_and_last(self) -> None:
        self.check(
            "boundary_first_and_last",
            """\
3 pieces: 1 captured, 2 eager; 2 distinct; 768*s0 B cross
sizes: s0 = x.size()[0]
piece_0  eager     1 op
  why  splitting_op: torch.nn.functional.scaled_dot_product_attention [ALWAYS]
  at   h = F.scaled_dot_product_attention(x, x, x).sin() * 2
  in   s0, x f32[s0, 4, 16] 256*s0 B
  out  scaled_dot_product_attention f32[s0, 4, 16] 256*s0 B
piece_1  captured  2 ops
  at   h = F.scaled_dot_product_attention(x, x, x).sin() * 2
  in   s0, scaled_dot_product_attention f32[s0, 4, 16] 256*s0 B
  out  h f32[s0, 4, 16] 256*s0 B
piece_2  eager     1 op, same as piece_0
  why  splitting_op: torch.nn.functional.scaled_dot_product_attention [ALWAYS]
  at   return F.scaled_dot_product_attention(h, h, h)
  in   s0, h f32[s0, 4, 16] 256*s0 B
  out  scaled_dot_product_attention_1 f32[s0, 4, 16] 256*s0 B""",
        )

    def test_allocation_between(self) -> None:
        self.check(
            "allocation_between",
            """\
3 pieces: 2 captured, 1 eager; 3 distinct; 1024*s0 B cross
sizes: s0 = x.size()[0]
piece_0  captured  3 ops
  at   h = x.sin()
  in   s0, x f32[s0, 4, 16] 256*s0 B
  out  h f32[s0, 4, 16] 256*s0 B, first f32[s0, 4, 16] 256*s0 B, second f32[s0, 4, 16] 256*s0 B
piece_1  eager     2 ops
  why  splitting_op: cgtest::attend [NEVER]
  at   torch.ops.cgtest.attend(h, h, h, first)
  at   torch.ops.cgtest.attend(h, first, h, second)
  in   s0, h f32[s0, 4, 16] 256*s0 B, first f32[s0, 4, 16] 256*s0 B, second f32[s0, 4, 16] 256*s0 B
  out  -
piece_2  captured  1 op
  at   return second.cos()
  in   s0, second f32[s0, 4, 16] 256*s0 B
  out  cos f32[s0, 4, 16] 256*s0 B""",
        )

    def test_two_symbols(self) -> None:
        self.check(
            "two_symbols",
            """\
3 pieces: 2 captured, 1 eager; 3 distinct; 320*s0*s1 B cross
sizes: s0 = x.size()[0], s1 = x.size()[1]
piece_0  captured  5 ops
  at   q, k, v = self.qkv(x).chunk(3, -1)
  in   s0, s1, x f32[s0, s1, 16] 64*s0*s1 B, 2 static 3264 B
  out  q f32[s0, s1, 16] 64*s0*s1 of 192*s0*s1 B, k f32[s0, s1, 16] 64*s0*s1 of 192*s0*s1 B, v f32[s0, s1, 16] 64*s0*s1 of 192*s0*s1 B
piece_1  eager     1 op
  why  splitting_op: torch.nn.functional.scaled_dot_product_attention [ALWAYS]
  at   out = F.scaled_dot_product_attention(q, k, v)
  in   s0, s1, q f32[s0, s1, 16] 64*s0*s1 of 192*s0*s1 B, k f32[s0, s1, 16] 64*s0*s1 of 192*s0*s1 B, v f32[s0, s1, 16] 64*s0*s1 of 192*s0*s1 B
  out  out f32[s0, s1, 16] 64*s0*s1 B
piece_2  captured  5 ops
  at   return out.reshape(-1, D).view(q.shape) * q.shape[1]
  in   s0, s1, out f32[s0, s1, 16] 64*s0*s1 B, x f32[s0, s1, 16] 64*s0*s1 B, 2 static 1088 B
  out  add f32[s0, s1, 16] 64*s0*s1 B""",
        )

    def test_guard(self) -> None:
        self.check(
            "guard",
            """\
2 pieces: 1 captured, 1 eager; 2 distinct; 512*s0 B cross
sizes: s0 = x.size()[0]
piece_0  eager     1 op
  why  splitting_op: torch.nn.functional.scaled_dot_product_attention [ALWAYS]
  at   h = F.scaled_dot_product_attention(x, x, x)
  in   s0, x f32[s0, 4, 16] 256*s0 B
  out  h f32[s0, 4, 16] 256*s0 B
piece_1  captured  1 op
  at   return h.sin() if h.shape[0] % 4 == 0 else h.cos()
  in   s0, h f32[s0, 4, 16] 256*s0 B
  out  sin f32[s0, 4, 16] 256*s0 B""",
        )

    def test_tied_weights(self) -> None:
        self.check(
            "tied_weights",
            """\
3 pieces: 2 captured, 1 eager; 3 distinct; 1024*s0 B cross
sizes: s0 = ids.size()[0]
piece_0  captured  1 op
  at   x = self.embed(ids)
  in   s0, ids i64[s0, 4] 32*s0 B, 1 static 2048 B
  out  x f32[s0, 4, 16] 256*s0 B
piece_1  eager     1 op
  why  splitting_op: torch.nn.functional.scaled_dot_product_attention [ALWAYS]
  at   return self.head(F.scaled_dot_product_attention(x, x, x))
  in   s0, x f32[s0, 4, 16] 256*s0 B
  out  scaled_dot_product_attention f32[s0, 4, 16] 256*s0 B
piece_2  captured  1 op
  at   return self.head(F.scaled_dot_product_attention(x, x, x))
  in   s0, scaled_dot_product_attention f32[s0, 4, 16] 256*s0 B, 1 static 2048 B
  out  linear f32[s0, 4, 32] 512*s0 B""",
        )

    def test_nonzero_graph_break(self) -> None:
        self.check(
            "nonzero_graph_break",
            """\
1 piece: 1 captured, 0 eager; 1 distinct; 4608 B cross
piece_0  captured  5 ops
  at   q, k, v = self.qkv(x).chunk(3, -1)
  in   x f32[6, 4, 16] 1536 B, 2 static 3264 B
  out  q f32[6, 4, 16] 1536 of 4608 B, k f32[6, 4, 16] 1536 of 4608 B, v f32[6, 4, 16] 1536 of 4608 B
ended by a graph break: ...

1 piece: 1 captured, 0 eager; 1 distinct; 384 B cross
piece_0  captured  2 ops
  at   rows = (k > 0).flatten().nonzero()[:, 0]
  in   k f32[6, 4, 16] 1536 of 4608 B
  out  flatten b8[384] 384 B
ended by a graph break: ...

1 piece: 1 captured, 0 eager; 1 distinct; 1536 B cross
piece_0  captured  7 ops
  at   rows = (k > 0).flatten().nonzero()[:, 0]
  in   stack0 i64[196, 1] 1568 B, v f32[6, 4, 16] 1536 of 4608 B, q f32[6, 4, 16] 1536 of 4608 B
  out  add f32[6, 4, 16] 1536 B

1 piece: 1 captured, 0 eager; 1 distinct; 1536 B cross
piece_0  captured  2 ops
  at   return x + self.out(self.attend(q, k, v))
  in   stack2 f32[6, 4, 16] 1536 B, stack0 f32[6, 4, 16] 1536 B, 2 static 1088 B
  out  add f32[6, 4, 16] 1536 B""",
        )

    def test_unbacked_input(self) -> None:
        self.check(
            "unbacked_input",
            """\
3 pieces: 2 captured, 1 eager; 3 distinct; 1280*s0 B cross
sizes: s0 = x.size()[0]
piece_0  captured  6 ops
  at   q, k, v = self.qkv(x).chunk(3, -1)
  in   s0, x f32[s0, 4, 16] 256*s0 B, 2 static 3264 B
  out  q f32[s0, 4, 16] 256*s0 of 768*s0 B, k f32[s0, 4, 16] 256*s0 of 768*s0 B, v f32[s0, 4, 16] 256*s0 of 768*s0 B
piece_1  eager     1 op
  why  splitting_op: torch.nn.functional.scaled_dot_product_attention [ALWAYS]
  at   return F.scaled_dot_product_attention(q, k, v)
  in   s0, q f32[s0, 4, 16] 256*s0 of 768*s0 B, k f32[s0, 4, 16] 256*s0 of 768*s0 B, v f32[s0, 4, 16] 256*s0 of 768*s0 B
  out  scaled_dot_product_attention f32[s0, 4, 16] 256*s0 B
piece_2  captured  2 ops
  at   return x + self.out(self.attend(q, k, v))
  in   s0, scaled_dot_product_attention f32[s0, 4, 16] 256*s0 B, x f32[s0, 4, 16] 256*s0 B, 2 static 1088 B
  out  add f32[s0, 4, 16] 256*s0 B""",
        )

    def test_decoder(self) -> None:
        self.check(
            "decoder",
            """\
5 pieces: 3 captured, 2 eager; 4 distinct; 3072*s0 B cross
sizes: s0 = ids.size()[0]
piece_0  captured  8 ops
  at   x = self.embed(ids)
  in   s0, ids i64[s0, 4] 32*s0 B, 3 static 5184 B
  out  x f32[s0, 4, 16] 256*s0 B, q f32[s0, 2, 4, 8] 256*s0 of 768*s0 B, k f32[s0, 2, 4, 8] 256*s0 of 768*s0 B, v f32[s0, 2, 4, 8] 256*s0 of 768*s0 B
piece_1  eager     1 op
  why  splitting_op: torch.nn.functional.scaled_dot_product_attention [ALWAYS]
  at   attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
  in   s0, q f32[s0, 2, 4, 8] 256*s0 of 768*s0 B, k f32[s0, 2, 4, 8] 256*s0 of 768*s0 B, v f32[s0, 2, 4, 8] 256*s0 of 768*s0 B
  out  attended f32[s0, 2, 4, 8] 256*s0 B
piece_2  captured  18 ops
  at   x = x + self.out(attended.transpose(1, 2).flatten(2))
  in   s0, attended f32[s0, 2, 4, 8] 256*s0 B, x f32[s0, 4, 16] 256*s0 B, 10 static 10688 B
  out  x_2 f32[s0, 4, 16] 256*s0 B, q_1 f32[s0, 2, 4, 8] 256*s0 of 768*s0 B, k_1 f32[s0, 2, 4, 8] 256*s0 of 768*s0 B, v_1 f32[s0, 2, 4, 8] 256*s0 of 768*s0 B
piece_3  eager     1 op, same as piece_1
  why  splitting_op: torch.nn.functional.scaled_dot_product_attention [ALWAYS]
  at   attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
  in   s0, q_1 f32[s0, 2, 4, 8] 256*s0 of 768*s0 B, k_1 f32[s0, 2, 4, 8] 256*s0 of 768*s0 B, v_1 f32[s0, 2, 4, 8] 256*s0 of 768*s0 B
  out  attended_1 f32[s0, 2, 4, 8] 256*s0 B
piece_4  captured  13 ops
  at   x = x + self.out(attended.transpose(1, 2).flatten(2))
  in   s0, attended_1 f32[s0, 2, 4, 8] 256*s0 B, x_2 f32[s0, 4, 16] 256*s0 B, 10 static 9664 B
  out  linear_10 f32[s0, 4, 32] 512*s0 B""",
        )

    def test_inplace_by_position(self) -> None:
        self.check(
            "inplace_by_position",
            """\
3 pieces: 2 captured, 1 eager; 3 distinct; 1028*s0 B cross
sizes: s0 = x.size()[0]
piece_0  captured  2 ops
  at   h = x * 2
  in   s0, x f32[s0, 4, 16] 256*s0 B
  out  h f32[s0, 4, 16] 256*s0 B
piece_1  eager     1 op
  why  splitting_op: torch.nn.functional.scaled_dot_product_attention [ALWAYS]
  at   y = F.scaled_dot_product_attention(x, x, x)
  in   s0, x f32[s0, 4, 16] 256*s0 B
  out  y f32[s0, 4, 16] 256*s0 B
piece_2  captured  8 ops
  at   h.add_(1)
  in   s0, h f32[s0, 4, 16] 256*s0 B, y f32[s0, 4, 16] 256*s0 B
  out  add_1 f32[s0, 4, 16] 256*s0 B, sum_1 f32[s0] 4*s0 B, add_1_1 f32[s0, 4, 16] 256*s0 B""",
        )

    def test_numbers_of_python(self) -> None:
        self.check(
            "numbers_of_python",
            """\
3 pieces: 2 captured, 1 eager; 2 distinct; 192*s0*s1 B cross
sizes: s0 = x.size()[0], s1 = x.size()[1]
piece_0  captured  2 ops
  at   x = self.norm(x) * self.scale
  in   s0, s1, x f32[s0, s1, 16] 64*s0*s1 B, 2 static 128 B
  out  x_1 f32[s0, s1, 16] 64*s0*s1 B
piece_1  eager     1 op
  why  splitting_op: torch.nn.functional.scaled_dot_product_attention [ALWAYS]
  at   return self.norm(F.scaled_dot_product_attention(x, x, x, scale=self.scale)) * self.scale
  in   s0, s1, x_1 f32[s0, s1, 16] 64*s0*s1 B
  out  scaled_dot_product_attention f32[s0, s1, 16] 64*s0*s1 B
piece_2  captured  2 ops, same as piece_0
  at   return self.norm(F.scaled_dot_product_attention(x, x, x, scale=self.scale)) * self.scale
  in   s0, s1, scaled_dot_product_attention f32[s0, s1, 16] 64*s0*s1 B, 2 static 128 B
  out  mul_1 f32[s0, s1, 16] 64*s0*s1 B""",
        )

    def test_derived_sizes(self) -> None:
        self.check(
            "derived_sizes",
            """\
3 pieces: 2 captured, 1 eager; 3 distinct; 24*s0*s1*s2 - 4*s0*s2 + 4*(((s0*s1*s2)//4)) B cross
sizes: s0 = x.size()[0], s1 = x.size()[1], s2 = x.size()[2]
piece_0  captured  1 op
  at   h = torch.cat([x, x], 1)
  in   s0, s1, s2, x f32[s0, s1, s2] 4*s0*s1*s2 B
  out  h f32[s0, 2*s1, s2] 8*s0*s1*s2 B
piece_1  eager     1 op
  why  splitting_op: torch.nn.functional.scaled_dot_product_attention [ALWAYS]
  at   y = F.scaled_dot_product_attention(h, h, h)
  in   s0, s1, s2, h f32[s0, 2*s1, s2] 8*s0*s1*s2 B
  out  y f32[s0, 2*s1, s2] 8*s0*s1*s2 B
piece_2  captured  5 ops
  at   return y[:, : h.shape[1] - 1] * (x.numel() // 2), y.flatten()[: x.numel() // 4].sin()
  in   s0, s1, s2, y f32[s0, 2*s1, s2] 8*s0*s1*s2 B
  out  mul f32[s0, 2*s1 - 1, s2] 4*s0*s2*(2*s1 - 1) of 8*s0*s1*s2 - 4*s0*s2 B, sin f32[((s0*s1*s2)//4)] 4*(((s0*s1*s2)//4)) B""",
        )

    def test_derived_strides(self) -> None:
        self.check(
            "derived_strides",
            """\
2 pieces: 1 captured, 1 eager; 2 distinct; 384*s0 B cross
sizes: s0 = x.size()[0]
piece_0  eager     1 op
  why  splitting_op: torch.nn.functional.scaled_dot_product_attention [ALWAYS]
  at   y = F.scaled_dot_product_attention(x, x, x).transpose(0, 1).contiguous().transpose(0, 1)
  in   s0, x f32[s0, 4, 16] 256*s0 B
  out  scaled_dot_product_attention f32[s0, 4, 16] 256*s0 B
piece_1  captured  5 ops
  at   y = F.scaled_dot_product_attention(x, x, x).transpose(0, 1).contiguous().transpose(0, 1)
  in   s0, scaled_dot_product_attention f32[s0, 4, 16] 256*s0 B
  out  sin f32[s0, 2, 16] 128*s0 B""",
        )

    def test_sdpa_kernel(self) -> None:
        self.check(
            "sdpa_kernel",
            """\
3 pieces: 2 captured, 1 eager; 3 distinct; 1280*s0 B cross
sizes: s0 = x.size()[0]
piece_0  captured  5 ops
  at   q, k, v = self.qkv(x).chunk(3, -1)
  in   s0, x f32[s0, 4, 16] 256*s0 B, 2 static 3264 B
  out  q f32[s0, 4, 16] 256*s0 of 768*s0 B, k f32[s0, 4, 16] 256*s0 of 768*s0 B, v f32[s0, 4, 16] 256*s0 of 768*s0 B
piece_1  eager     9 ops
  why  splitting_op: torch.nn.functional.scaled_dot_product_attention [ALWAYS]
  why  state_region: in one torch.nn.attention.sdpa_kernel region with torch.nn.functional.scaled_dot_product_attention [ALWAYS]
  at   return F.scaled_dot_product_attention(q, k, v)
  in   s0, q f32[s0, 4, 16] 256*s0 of 768*s0 B, k f32[s0, 4, 16] 256*s0 of 768*s0 B, v f32[s0, 4, 16] 256*s0 of 768*s0 B
  out  scaled_dot_product_attention f32[s0, 4, 16] 256*s0 B
piece_2  captured  2 ops
  at   return x + self.out(self.attend(q, k, v))
  in   s0, scaled_dot_product_attention f32[s0, 4, 16] 256*s0 B, x f32[s0, 4, 16] 256*s0 B, 2 static 1088 B
  out  add f32[s0, 4, 16] 256*s0 B""",
        )

    def test_inference_mode(self) -> None:
        self.check(
            "inference_mode",
            """\
3 pieces: 2 captured, 1 eager; 3 distinct; 1280*s0 B cross
sizes: s0 = args.0.size()[0]
piece_0  captured  6 ops
  at   q, k, v = self.qkv(x).chunk(3, -1)
  in   s0, args_0 f32[s0, 4, 16] 256*s0 B, 2 static 3264 B
  out  q f32[s0, 4, 16] 256*s0 of 768*s0 B, k f32[s0, 4, 16] 256*s0 of 768*s0 B, v f32[s0, 4, 16] 256*s0 of 768*s0 B
piece_1  eager     1 op
  why  splitting_op: torch.nn.functional.scaled_dot_product_attention [ALWAYS]
  at   return F.scaled_dot_product_attention(q, k, v)
  in   s0, q f32[s0, 4, 16] 256*s0 of 768*s0 B, k f32[s0, 4, 16] 256*s0 of 768*s0 B, v f32[s0, 4, 16] 256*s0 of 768*s0 B
  out  scaled_dot_product_attention f32[s0, 4, 16] 256*s0 B
piece_2  captured  3 ops
  at   return x + self.out(self.attend(q, k, v))
  in   s0, scaled_dot_product_attention f32[s0, 4, 16] 256*s0 B, args_0 f32[s0, 4, 16] 256*s0 B, 2 static 1088 B
  out  add f32[s0, 4, 16] 256*s0 B""",
        )

    def test_gradient_inside(self) -> None:
        self.check(
            "gradient_inside",
            """\
2 pieces: 1 captured, 1 eager; 2 distinct; 512*s0 B cross
sizes: s0 = x.size()[0]
piece_0  eager     34 ops
  why  gradients: in one torch.func.grad region with torch.nn.functional.scaled_dot_product_attention [ALWAYS]
  why  splitting_op: torch.nn.functional.scaled_dot_product_attention [ALWAYS]
  at   g = torch.func.grad(lambda t: (t.sin() ** 2).sum())(x)
  at   g = torch.func.grad(lambda t: (t.sin() ** 2).sum())(x)
  at   y = F.scaled_dot_product_attention(g, g, g)
  at   2 more lines
  in   s0, x f32[s0, 4, 16] 256*s0 B
  out  w f32[s0, 4, 16] 256*s0 B
piece_1  captured  2 ops
  at   return w * 2 + 1
  in   s0, w f32[s0, 4, 16] 256*s0 B
  out  add f32[s0, 4, 16] 256*s0 B""",
        )

    def test_layout_changed_in_place(self) -> None:
        self.check(
            "layout_changed_in_place",
            """\
3 pieces: 2 captured, 1 eager; 3 distinct; 768*s0 + 256 B cross
sizes: s0 = x.size()[0]
piece_0  captured  2 ops, left uncompiled: memory that it writes has another name
  at   h = x * 2
  in   s0, x f32[s0, 4, 16] 256*s0 B
  out  h f32[s0, 16, 4] 256*s0 B, first f32[4, 16] 256 of 256*s0 B
piece_1  eager     1 op
  why  splitting_op: torch.nn.functional.scaled_dot_product_attention [ALWAYS]
  at   y = F.scaled_dot_product_attention(x, x, x)
  in   s0, x f32[s0, 4, 16] 256*s0 B
  out  y f32[s0, 4, 16] 256*s0 B
piece_2  captured  4 ops, left uncompiled: memory that it writes has another name
  at   h.transpose_(1, 2)
  in   s0, h f32[s0, 16, 4] 256*s0 B, first f32[4, 16] 256 of 256*s0 B
  out  mul_1 f32[s0, 16, 4] 256*s0 B, mul_2 f32[4, 16] 256 B""",
        )

    def test_size_returned_around_no_grad(self) -> None:
        self.check(
            "size_returned_around_no_grad",
            """\
1 piece: 0 captured, 1 eager; 1 distinct; 256*s0 B cross
sizes: s0 = x.size()[0]
piece_0  eager     1 op
  why  splitting_op: torch.nn.functional.scaled_dot_product_attention [ALWAYS]
  at   y = F.scaled_dot_product_attention(x, x, x)
  in   s0, x f32[s0, 4, 16] 256*s0 B
  out  y f32[s0, 4, 16] 256*s0 B
sizes returned: mul""",
        )

    def test_unbound_piece_written(self) -> None:
        self.check(
            "unbound_piece_written",
            """\
3 pieces: 2 captured, 1 eager; 3 distinct; 4608 B cross
piece_0  captured  1 op
  at   rows = (x * 2).unbind(1)
  in   x f32[6, 4, 16] 1536 B
  out  mul f32[6, 4, 16] 1536 B
piece_1  eager     1 op
  why  splitting_op: torch.nn.functional.scaled_dot_product_attention [ALWAYS]
  at   y = F.scaled_dot_product_attention(x, x, x)
  in   x f32[6, 4, 16] 1536 B
  out  y f32[6, 4, 16] 1536 B
piece_2  captured  9 ops
  at   rows = (x * 2).unbind(1)
  in   mul f32[6, 4, 16] 1536 B, y f32[6, 4, 16] 1536 B
  out  add_1 f32[6, 4, 16] 1536 B, getitem_6 f32[6, 16] 384 of 1536 B""",
        )

    def test_number_from_tensor(self) -> None:
        self.check(
            "number_from_tensor",
            """\
1 piece: 0 captured, 1 eager; 1 distinct; 64*s0*s94 B cross
sizes: s0 = x.size()[0]
piece_0  eager     4 ops
  why  host_sync: the size or value of item depends on data
  why  splitting_op: torch.nn.functional.scaled_dot_product_attention [ALWAYS]
  why  unbacked_size: works on a size or number that depends on data
  at   h = x[:, : rows.item()]
  at   return F.scaled_dot_product_attention(h, h, h) * 2
  in   s0, rows i64[] 8 B, x f32[s0, 4, 16] 256*s0 B
  out  mul f32[s0, s94, 16] 64*s0*s94 B""",
        )


def test_a_graph_break_is_reported_with_its_cause_and_line() -> None:
    case = CASES["nonzero_graph_break"]
    backend = backend_for(case, "eager")
    with torch.no_grad(), torch._dynamo.config.patch(**case.dynamo):
        torch.compile(build(case), backend=backend)(*case.inputs(6))
    breaks = [graph.split.graph_break for graph in backend.graphs]
    assert breaks[-1] is None
    assert any("cases.py:" in each for each in breaks if each)
    assert any(each in str(backend.graphs[0].split) for each in breaks if each)


def test_every_case_has_a_snapshot() -> None:
    missing = [name for name in CASES if not hasattr(SplitSnapshots, f"test_{name}")]
    assert not missing, f"add a snapshot for: {missing}"
