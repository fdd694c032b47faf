"""Flex attention: gradients, sinks, blocks, and what its functions of an index count from."""

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from equivalence_tests.learn.excerpts import Place
from equivalence_tests.learn.traps.entry import Severity, Trap
from equivalence_tests.learn.traps.operations import largest_result
from scratch import flex, mask_functions, score_functions

__all__ = ["TRAPS"]


class FlexNoCpuGradient(Trap):
    """flex_attention has no gradient on the CPU."""

    number = 57
    name = "flex_no_cpu_gradient"
    severity = Severity.ERROR
    concerns = ("flex_attention.query", "flex_attention.key", "flex_attention.value")
    expects = "What runs on the CPU also trains there, for a test of the backward pass or a small model."
    happens = (
        "An error as soon as an input requires a gradient, and a model's own parameters do, even under torch.no_grad()."
    )
    why = (
        "The backward pass is a kernel for GPUs. The check looks at requires_grad and not at the mode. On the CPU, "
        "only tensors that score_mod reads get gradients. By hand the steps are ordinary operations, which have "
        "gradients everywhere."
    )
    places = (Place(flex.row_scores, "of_queries(q) @"), Place(flex.attend, "context, _ = weigh"))
    instead = "scratch.flex_attention trains on the CPU, with the same arguments. For inference, detach the inputs."
    issues = ("pytorch/pytorch#148752", "pytorch/pytorch#169224")
    raises = "does not support backward on CPU"

    def wrong(self) -> None:
        x = torch.randn(1, 2, 5, 8, requires_grad=True)
        with torch.no_grad():
            flex_attention(x, x, x)

    def right(self) -> Tensor:
        x = torch.randn(1, 2, 5, 8, requires_grad=True)
        flex.flex_attention(x, x, x).square().sum().backward()
        print("gradient:", tuple(x.grad.shape))  # type: ignore[union-attr]
        return x.grad  # type: ignore[return-value]

    def helps(self, right: Tensor) -> bool:
        return bool(right.isfinite().all() and right.any())


class FlexSinkInScoreMod(Trap):
    """A sink added in score_mod does nothing."""

    number = 58
    name = "flex_sink_in_score_mod"
    severity = Severity.WRONG_NUMBERS
    concerns = ("flex_attention.score_mod", "flex_attention.return_aux", "flex_attention.return_lse")
    expects = "Adding a head's sink to each of its scores holds weight back, as a model with attention sinks needs it."
    happens = "The output is the one without sinks, to rounding."
    why = (
        "softmax does not change when all scores of a row move by the same amount. A sink is one more term in the "
        "denominator, and score_mod sees one score at a time, never their sum. The log-sum-exp is the logarithm of "
        "that sum, and corrects the output afterwards."
    )
    places = (Place(score_functions.add_sinks, "torch.sigmoid"),)
    instead = "Ask for the log-sum-exp, and multiply the output by sigmoid(lse - sink)."
    issues = ("huggingface/transformers#41026",)

    def wrong(self) -> float:
        x, sinks = torch.randn(1, 2, 5, 8), torch.tensor([1.0, 3.0])

        def with_sink(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score + sinks[h]

        output = flex_attention(x, x, x, score_mod=with_sink)
        difference = (output - flex_attention(x, x, x)).abs().max().item()
        print(f"greatest difference from no sinks at all: {difference:.1g}")
        return difference

    def right(self) -> float:
        x, sinks = torch.randn(1, 2, 5, 8), torch.tensor([1.0, 3.0])
        output, aux = flex_attention(x, x, x, return_aux=AuxRequest(lse=True))
        held_back = aux.lse - sinks[:, None]  # type: ignore[operator]
        output = output * torch.sigmoid(held_back)[..., None]
        # The definition: one more score for each query, with a value of 0.
        scores = torch.cat([x @ x.mT / 8**0.5, sinks.view(1, 2, 1, 1).expand(1, 2, 5, 1)], -1)
        difference = (output - scores.softmax(-1)[..., :-1] @ x).abs().max().item()
        print(f"greatest difference from the definition: {difference:.1g}")
        return difference

    def holds(self, wrong: float) -> bool:
        return wrong < 1e-5

    def helps(self, right: float) -> bool:
        return right < 1e-5


class FlexEagerIgnoresBlocks(Trap):
    """Without torch.compile the blocks of a block mask are ignored."""

    number = 59
    name = "flex_eager_ignores_blocks"
    severity = Severity.WRONG_NUMBERS
    concerns = ("flex_attention.block_mask", "create_block_mask.separate_full_blocks")
    expects = "Each block of queries sees the blocks that are listed for it, and no others."
    happens = "Every query sees every key. Under torch.compile the same call obeys the lists: the output differs."
    why = (
        "The path without torch.compile writes out all scores and asks only mask_mod, which lets everything be seen "
        "if it is not given. By hand, only the listed blocks are visited, and mask_mod is asked inside them."
    )
    places = (Place(flex.block_rows, "asked = places_of_keys"), Place(flex.row_scores, "may_attend ="))
    instead = (
        "Give mask_mod together with the lists, so that both say the same; or let create_block_mask make the lists."
    )
    since = "2.5"

    def wrong(self) -> float:
        x = torch.randn(1, 1, 4, 8)
        one_each = torch.tensor([[[1, 1]]], dtype=torch.int32)
        diagonal = torch.tensor([[[[0, 1], [1, 0]]]], dtype=torch.int32)
        blocks = BlockMask.from_kv_blocks(one_each, diagonal, BLOCK_SIZE=2)
        print(blocks.to_dense()[0, 0])
        output = flex_attention(x, x, x, block_mask=blocks)
        difference = (output - flex_attention(x, x, x)).abs().max().item()
        print(f"greatest difference from no mask at all: {difference:.1g}")
        return difference

    def right(self) -> float:
        x = torch.randn(1, 1, 4, 8)
        one_each = torch.tensor([[[1, 1]]], dtype=torch.int32)
        diagonal = torch.tensor([[[[0, 1], [1, 0]]]], dtype=torch.int32)

        def same_block(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return q_idx // 2 == kv_idx // 2

        blocks = BlockMask.from_kv_blocks(one_each, diagonal, BLOCK_SIZE=2, mask_mod=same_block)
        output = flex_attention(x, x, x, block_mask=blocks)
        alone = flex_attention(x[:, :, 2:], x[:, :, 2:], x[:, :, 2:])
        difference = (output[:, :, 2:] - alone).abs().max().item()
        print(f"greatest difference of the second block from itself alone: {difference:.1g}")
        return difference

    def holds(self, wrong: float) -> bool:
        return wrong == 0

    def helps(self, right: float) -> bool:
        return right < 1e-5


class FlexPlanOfOneSample(Trap):
    """B=None plans the blocks of sample 0 for all samples."""

    number = 60
    name = "flex_plan_of_one_sample"
    severity = Severity.WRONG_NUMBERS
    concerns = ("create_block_mask.B", "create_block_mask.H", "create_block_mask.mask_mod")
    expects = "mask_mod reads the documents of each sample, so that each sample gets its own mask."
    happens = (
        "The plan is that of sample 0. Sample 1 is a single document, but the plan keeps its second block of queries "
        "from the first block of keys. Compiled kernels skip that block; without torch.compile the plan is ignored, "
        "and all looks well."
    )
    why = "None stands for 1: mask_mod is asked with b = 0 alone. By hand too, what is not in the plan is not computed."
    places = (Place(flex.create_block_mask, "size or 1"),)
    instead = "Give B where mask_mod reads b, and H where it reads h."

    def wrong(self) -> bool:
        documents = torch.tensor([[0, 0, 1, 1], [0, 0, 0, 0]])  # sample 1 has one document

        def same_document(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return documents[b, q_idx] == documents[b, kv_idx]

        plan = create_block_mask(same_document, None, None, 4, 4, "cpu", BLOCK_SIZE=2)
        print(plan.to_dense()[0, 0])  # for sample 1 as well
        return bool(plan.to_dense().all())

    def right(self) -> bool:
        documents = torch.tensor([[0, 0, 1, 1], [0, 0, 0, 0]])  # sample 1 has one document

        def same_document(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return documents[b, q_idx] == documents[b, kv_idx]

        plan = create_block_mask(same_document, 2, None, 4, 4, "cpu", BLOCK_SIZE=2)
        print(plan.to_dense()[1, 0])  # of sample 1
        return bool(plan.to_dense()[1].all())

    def holds(self, wrong: bool) -> bool:
        return not wrong

    def helps(self, right: bool) -> bool:
        return right


class FlexRowsGuaranteedSafe(Trap):
    """ROWS_GUARANTEED_SAFE asks for more than one visible key in every row."""

    number = 61
    name = "flex_rows_guaranteed_safe"
    severity = Severity.WRONG_NUMBERS
    concerns = ("flex_attention.kernel_options",)
    expects = (
        "In a causal window every query sees itself: no row is empty, which is what the documentation of 2.13 asks for."
    )
    happens = (
        "NaN on a GPU. It is shown here by the kernel's sum, written out, because only the compiled kernel reads the "
        "option: without torch.compile nothing happens, and no test on a CPU finds it."
    )
    why = (
        "The kernel goes through the blocks and keeps the greatest score so far, starting from -inf. Query 3 sees "
        "nothing in the first block, and -inf - (-inf) is NaN; the option removes the guard against that. So each row "
        "needs a visible key in its first block."
    )
    places = (Place(flex.attend, "open_blind_rows"),)
    instead = "Leave it off, unless the first block that is computed for a query always holds a key that it sees."
    issues = ("pytorch/pytorch#194154",)

    def wrong(self) -> Tensor:
        scores = torch.randn(4, 4)
        steps = torch.arange(4)[:, None] - torch.arange(4)
        scores[(steps < 0) | (steps > 1)] = -torch.inf  # a causal window of 2
        print("queries without a key:", (scores == -torch.inf).all(-1).sum().item())
        highest, total = torch.full((4,), -torch.inf), torch.zeros(4)
        for block in scores.split(2, dim=-1):
            new = torch.maximum(highest, block.amax(-1))
            rescaled = total * (highest - new).exp()
            total = rescaled + (block - new[:, None]).exp().sum(-1)
            highest = new
        print("sums:", total)
        return total

    def right(self) -> Tensor:
        scores = torch.randn(4, 4)
        steps = torch.arange(4)[:, None] - torch.arange(4)
        scores[(steps < 0) | (steps > 1)] = -torch.inf  # a causal window of 2
        highest, total = torch.full((4,), -torch.inf), torch.zeros(4)
        for block in scores.split(2, dim=-1):
            new = torch.maximum(highest, block.amax(-1))
            base = new.nan_to_num(neginf=0.0)  # the guard
            rescaled = total * (highest - base).exp()
            total = rescaled + (block - base[:, None]).exp().sum(-1)
            highest = new
        print("sums:", total)
        return total

    def holds(self, wrong: Tensor) -> bool:
        return wrong.isnan().tolist() == [False, False, False, True]

    def helps(self, right: Tensor) -> bool:
        return bool(right.isfinite().all())


class FlexIndexFromZero(Trap):
    """q_idx counts from 0, even where the queries are the last of the keys."""

    number = 62
    name = "flex_index_from_zero"
    severity = Severity.WRONG_NUMBERS
    concerns = ("flex_attention.score_mod", "create_block_mask.mask_mod", "create_block_mask.Q_LEN")
    expects = (
        "The newest token, with three in the cache before it, sees all four keys: it is not earlier than any of them."
    )
    happens = "It sees only the first key."
    why = (
        "Its index is 0: q_idx counts the queries of this call, so a mask of q_idx >= kv_idx starts at the upper left "
        "corner."
    )
    places = (Place(score_functions.causal, "kv_idx <= q_idx + offset"),)
    instead = "Add the number of keys before the first query to q_idx; score_functions.causal(offset) does."

    def wrong(self) -> Tensor:
        query, key = torch.zeros(1, 1, 1, 8), torch.randn(1, 1, 4, 8)  # all scores are 0
        value = torch.eye(4)[None, None]  # the output is the weights

        def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return q_idx >= kv_idx

        mask = create_block_mask(causal, None, None, 1, 4, "cpu")
        weights = flex_attention(query, key, value, block_mask=mask)
        print(weights[0, 0])
        return weights

    def right(self) -> Tensor:
        query, key = torch.zeros(1, 1, 1, 8), torch.randn(1, 1, 4, 8)  # all scores are 0
        value = torch.eye(4)[None, None]  # the output is the weights

        def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return q_idx + 3 >= kv_idx  # three keys before the first query

        mask = create_block_mask(causal, None, None, 1, 4, "cpu")
        weights = flex_attention(query, key, value, block_mask=mask)
        print(weights[0, 0])
        return weights

    def holds(self, wrong: Tensor) -> bool:
        return wrong.flatten().tolist() == [1.0, 0.0, 0.0, 0.0]

    def helps(self, right: Tensor) -> bool:
        return right.flatten().tolist() == [0.25] * 4


class GroupedHeadsTiled(Trap):
    """Neighbouring query heads share a key head: repeat() pairs the wrong heads."""

    number = 63
    name = "grouped_heads_tiled"
    severity = Severity.WRONG_NUMBERS
    concerns = ("enable_gqa",)
    expects = "Keys of 2 heads repeated to 4 give the same as enable_gqa=True with the 2."
    happens = (
        "They do not: heads 1 and 2 look at each other's keys. With one key head, or as many as there are query "
        "heads, it is right."
    )
    why = (
        "repeat() lays the heads out as 0, 1, 0, 1. A group consists of neighbouring heads, as in the weights of "
        "published models: 0, 0, 1, 1, which is what repeat_interleave() gives."
    )
    places = (Place(flex.working_copies, "repeat_interleave"),)
    instead = "key.repeat_interleave(num_heads // num_key_heads, dim=1), or enable_gqa=True."

    def wrong(self) -> list[float]:
        query, key, value = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
        output = F.scaled_dot_product_attention(query, key.repeat(1, 2, 1, 1), value.repeat(1, 2, 1, 1))
        grouped = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        difference = (output - grouped).abs().amax((0, 2, 3))
        print("difference of each head:", difference)
        return difference.tolist()

    def right(self) -> list[float]:
        query, key, value = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
        output = F.scaled_dot_product_attention(
            query, key.repeat_interleave(2, dim=1), value.repeat_interleave(2, dim=1)
        )
        grouped = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        difference = (output - grouped).abs().amax((0, 2, 3))
        print("difference of each head:", difference)
        return difference.tolist()

    def holds(self, wrong: list[float]) -> bool:
        first, second, third, fourth = wrong
        return max(first, fourth) < 1e-5 and min(second, third) > 0.01

    def helps(self, right: list[float]) -> bool:
        return max(right) < 1e-5


class BlockMaskWrittenOut(Trap):
    """create_block_mask builds the whole mask before it makes blocks of it."""

    number = 74
    name = "block_mask_written_out"
    severity = Severity.SLOW
    concerns = ("create_block_mask.mask_mod", "create_block_mask.Q_LEN", "create_block_mask.KV_LEN")
    expects = "A plan of 16 by 16 blocks takes a few kilobytes, however long the sequence."
    happens = (
        "The plan itself does, but making it does not: several tables of 2048 by 2048 are built first. With 96,000 "
        "tokens this needs more memory than a GPU has, although the attention itself would fit."
    )
    why = "mask_mod is called for all positions at once. By hand it is called for one row of blocks after another."
    places = (Place(flex.create_block_mask, "may_attend ="),)
    instead = (
        "Write the lists yourself where a formula gives them, as for a causal mask; or use scratch.create_block_mask, "
        "or compile create_block_mask, which then builds only the blocks."
    )
    issues = ("pytorch/pytorch#134756",)

    def wrong(self) -> int:
        def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return q_idx >= kv_idx

        largest = largest_result(lambda: create_block_mask(causal, None, None, 2048, 2048, "cpu"))
        print(f"largest tensor on the way: {largest // 1024} KiB")
        return largest

    def right(self) -> int:
        def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return q_idx >= kv_idx

        def planned() -> BlockMask:
            rows = torch.arange(2048 // 128, dtype=torch.int32)
            return BlockMask.from_kv_blocks(rows[None, None] + 1, rows.repeat(1, 1, 16, 1), mask_mod=causal)

        largest = largest_result(planned)
        print(f"largest tensor on the way: {largest / 1024:.1f} KiB")
        print("the same blocks:", planned().to_dense().equal(torch.ones(1, 1, 16, 16).tril().int()))
        return largest

    def holds(self, wrong: int) -> bool:
        return wrong >= 2048 * 2048

    def helps(self, right: int) -> bool:
        return right < 100 * 1024


class MaskModAskedBeyondEnd(Trap):
    """mask_mod is called at every position, even beyond the end of a table that it reads."""

    number = 75
    name = "mask_mod_asked_beyond_end"
    severity = Severity.ERROR
    concerns = ("create_block_mask.mask_mod", "flex_attention.score_mod")
    expects = "kv_idx < 5 comes first, so the table of 5 tokens is never read beyond its end."
    happens = (
        "An error: it is read at position 5. On a GPU this ends the process or, in a compiled kernel, silently reads "
        "beyond the table. The same holds for a table in score_mod, which is called before mask_mod hides anything."
    )
    why = (
        "& is an operation on tensors: both sides are computed for all positions. By hand, the function gets all "
        "indices too."
    )
    places = (Place(mask_functions.at_every_place, "vmap("),)
    instead = "Keep the index inside the table: clamp it, and let the condition hide the result."
    issues = ("pytorch/pytorch#188178", "pytorch/pytorch#137801")
    raises = "IndexError"

    def wrong(self) -> None:
        seen = torch.tensor([True, True, False, True, True])

        def some_keys(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return (kv_idx < 5) & seen[kv_idx]

        create_block_mask(some_keys, None, None, 4, 8, "cpu", BLOCK_SIZE=2)

    def right(self) -> Tensor:
        seen = torch.tensor([True, True, False, True, True])

        def some_keys(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return (kv_idx < 5) & seen[kv_idx.clamp(max=4)]

        plan = create_block_mask(some_keys, None, None, 4, 8, "cpu", BLOCK_SIZE=2)
        print(plan.to_dense()[0, 0])
        return plan.to_dense()[0, 0]

    def helps(self, right: Tensor) -> bool:
        return right.tolist() == [[1, 1, 1, 0]] * 2


TRAPS = (
    FlexNoCpuGradient,
    FlexSinkInScoreMod,
    FlexEagerIgnoresBlocks,
    FlexPlanOfOneSample,
    FlexRowsGuaranteedSafe,
    FlexIndexFromZero,
    GroupedHeadsTiled,
    BlockMaskWrittenOut,
    MaskModAskedBeyondEnd,
)
