"""The arguments of flex_attention and create_block_mask."""

import torch
from torch.nn.attention import flex_attention as flex

import scratch
from equivalence_tests.learn.excerpts import Place
from equivalence_tests.learn.explain.entry import BLOCKS, FLEX, Explanation
from scratch import create_block_mask, score_functions
from scratch import flex as by_hand

__all__ = ["EXPLANATIONS"]


def shapes() -> None:
    query = torch.randn(2, 3, 5, 8)  # batch, num_heads, query_len, head_dim
    key, value = torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 6)
    output = flex.flex_attention(query, key, value)
    print(tuple(output.shape))


def changed() -> None:
    query = key = torch.zeros(1, 1, 3, 8)  # all scores are 0
    value = torch.eye(3)[None, None]  # the output is the weights
    output = flex.flex_attention(
        query,
        key,
        value,
        score_mod=lambda score, b, h, i, j: score - (i - j).abs(),
    )
    print(output[0, 0])


def blocked() -> None:
    query = key = torch.zeros(1, 1, 4, 8)  # all scores are 0
    value = torch.eye(4)[None, None]  # the output is the weights
    causal = score_functions.causal()
    mask = flex.create_block_mask(causal, None, None, 4, 4, "cpu", 2)
    print(flex.flex_attention(query, key, value, block_mask=mask)[0, 0])


def summed() -> None:
    query, key, value = torch.randn(3, 1, 2, 5, 8)
    _, lse = scratch.flex_attention(query, key, value, return_lse=True)
    scores = query @ key.mT / 8**0.5
    print("log of the sum:", torch.allclose(lse, scores.logsumexp(-1)))


def asked_for() -> None:
    query, key, value = torch.randn(3, 1, 2, 5, 8)
    request = flex.AuxRequest(lse=True)
    _, aux = flex.flex_attention(query, key, value, return_aux=request)
    scores = query @ key.mT / 8**0.5
    expected = scores.logsumexp(-1)
    assert aux.lse is not None
    print("log of the sum:", torch.allclose(aux.lse, expected))


def without_options() -> None:
    x = torch.randn(1, 2, 5, 8)
    output = flex.flex_attention(x, x, x, kernel_options={})
    print(tuple(output.shape))


def planned() -> None:
    plan = flex.create_block_mask(
        mask_mod=lambda b, h, q_idx, kv_idx: q_idx >= kv_idx,
        B=None,
        H=None,
        Q_LEN=6,
        KV_LEN=6,
        device="cpu",
        BLOCK_SIZE=2,
    )
    print(plan.to_dense()[0, 0])  # 1 = some key of the block is seen


def apart() -> None:
    causal = score_functions.causal()
    for apart in (True, False):
        plan = create_block_mask(
            causal,
            B=1,
            H=1,
            Q_LEN=6,
            KV_LEN=6,
            device="cpu",
            BLOCK_SIZE=2,
            separate_full_blocks=apart,
        )
        print("blocks to ask about:", plan.kv_num_blocks[0, 0].tolist())


def for_kernels() -> None:
    plan = create_block_mask(
        score_functions.causal(),
        B=1,
        H=1,
        Q_LEN=6,
        KV_LEN=6,
        device="cpu",
        _compile=False,
        compute_dq_write_order=False,
        dq_kv_order=True,
    )
    print(plan.shape)


SCORES = Place(by_hand.row_scores, "row.of_queries(q) @")
SIZES = Place(by_hand.create_block_mask, "size or 1")
FOR_KERNELS = Place(by_hand.create_block_mask, "_compile=(_compile, False)")

EXPLANATIONS = (
    Explanation(
        "query",
        (FLEX,),
        "Who looks. It is (batch, num_heads, query_len, head_dim), always with four axes.",
        (SCORES,),
        shapes,
    ),
    Explanation(
        "key",
        (FLEX,),
        "What the queries are compared with. It is (batch, num_heads, key_len, head_dim). One sample of keys may "
        "serve all "
        "samples of a block mask.",
        (SCORES,),
        shapes,
    ),
    Explanation(
        "value",
        (FLEX,),
        "What the output is made of. It is (batch, num_heads, key_len, width), and the width is that of the output.",
        (Place(by_hand.attend, "context, _ = weigh"),),
        shapes,
    ),
    Explanation(
        "score_mod",
        (FLEX,),
        "A function that changes each score before the softmax. It gets the score and four indices, each a single "
        "number: the sample, the head of the query, the query and the key. It is written for one position and "
        "called for all at once, so it cannot branch on a number; it may read tensors at its indices, and these "
        "get gradients.",
        (Place(by_hand.row_scores, "scores = at_every_place(score_mod"),),
        changed,
    ),
    Explanation(
        "block_mask",
        (FLEX,),
        "Which blocks of keys each block of queries looks at. What it leaves out is computed neither by hand nor "
        "by compiled kernels; inside a block that is partly visible, its mask_mod decides about each position.",
        (Place(by_hand.block_rows, "yield BlockRow"), Place(by_hand.row_scores, "may_attend =")),
        blocked,
    ),
    Explanation(
        "return_lse",
        (FLEX,),
        "Also returns the logarithm of the sum of the exponentials of each query's scores. torch has deprecated "
        "it in favour of return_aux. It is (batch, num_heads, query_len), and -inf for a query that sees nothing.",
        (Place(by_hand.attend, "lse = torch.logsumexp"),),
        summed,
    ),
    Explanation(
        "return_aux",
        (FLEX,),
        "Asks for more than the output: the log-sum-exp, the greatest scores. They come as an AuxOutput next to "
        "the output. With the log-sum-exp, outputs over parts of the keys can be merged, and sinks added. torch "
        "gives no greatest scores on the CPU.",
        (Place(by_hand.attend, "lse = torch.logsumexp"), Place(by_hand.flex_attention, "AuxOutput(lse")),
        asked_for,
    ),
    Explanation(
        "kernel_options",
        (FLEX,),
        "Sizes and promises for torch's compiled kernels. They change how fast it is, and a false promise changes "
        "the numbers. By hand there is no such kernel, and options are rejected.",
        (Place(by_hand.flex_attention, "check_no_kernel_options"),),
        without_options,
    ),
    Explanation(
        "mask_mod",
        (BLOCKS,),
        "A function that returns True where a query may look at a key. It gets four indices: the sample, the head "
        "of the query, the query and the key. It is called once for every position when the plan is made, and "
        "again inside blocks that are partly visible.",
        (Place(by_hand.create_block_mask, "may_attend = at_every_place"),),
        planned,
    ),
    Explanation(
        "B",
        (BLOCKS,),
        "The number of samples. With None one plan is made, for sample 0, and serves all: right if mask_mod does not "
        "read the "
        "sample.",
        (SIZES,),
        planned,
    ),
    Explanation(
        "H",
        (BLOCKS,),
        "The number of heads of the queries. With None one plan serves all heads: right if mask_mod does not read the "
        "head.",
        (SIZES,),
        planned,
    ),
    Explanation(
        "Q_LEN", (BLOCKS,), "The number of queries. A plan serves this number and no other.", (SIZES,), planned
    ),
    Explanation("KV_LEN", (BLOCKS,), "The number of keys. A plan serves this number and no other.", (SIZES,), planned),
    Explanation(
        "device",
        (BLOCKS,),
        "Where the plan is built. With None it is the accelerator, if there is one. Whatever mask_mod reads has to be "
        "there too.",
        (SIZES,),
        planned,
    ),
    Explanation(
        "BLOCK_SIZE",
        (BLOCKS,),
        "How many queries and keys a block has, as one number or two. Small blocks leave out more, and make more work "
        "of planning. "
        "torch's kernels on GPUs want 128 or so.",
        (Place(by_hand.create_block_mask, "height, width ="),),
        planned,
        "        key 0 1 | 2 3 | 4 5\nquery 0     1 0 | . . | . .\nquery 1     1 1 | . . | . .   "
        "the dots are not computed\n           -----------------\nquery 2     1 1 | 1 0 | . .\nquery 3     1 1 | 1 1 "
        "| . .",
    ),
    Explanation(
        "separate_full_blocks",
        (BLOCKS,),
        "Whether fully visible blocks are listed separately. mask_mod is then called only for the other blocks. "
        "torch has it from 2.13 on.",
        (Place(by_hand.create_block_mask, "every.append"),),
        apart,
    ),
    Explanation(
        "_compile",
        (BLOCKS,),
        "Compiles the planning in torch, which has deprecated it. By hand it is refused: compile the function itself.",
        (FOR_KERNELS,),
        for_kernels,
    ),
    Explanation(
        "compute_dq_write_order",
        (BLOCKS,),
        "Plans the order in which one of torch's kernels adds up gradients. It makes that kernel's backward pass "
        "repeatable. "
        "By hand the order is fixed, and this is refused.",
        (FOR_KERNELS,),
        for_kernels,
    ),
    Explanation(
        "dq_kv_order",
        (BLOCKS,),
        "The direction of that order. It only matters with compute_dq_write_order, and scratch accepts only its "
        "default.",
        (FOR_KERNELS,),
        for_kernels,
    ),
)
