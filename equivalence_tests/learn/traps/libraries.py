"""The masks that `transformers` makes for an attention, and where it makes none."""

import torch
from torch import Tensor, nn

from equivalence_tests.learn.excerpts import Place
from equivalence_tests.learn.traps.entry import Severity, Trap
from scratch import MultiheadAttention, score_functions

__all__ = ["TRAPS"]


class AttentionFunctionWithoutMask(Trap):
    """An attention function registered without a mask function gets no mask, and sees the future."""

    number = 71
    name = "attention_function_without_mask"
    severity = Severity.WRONG_NUMBERS
    concerns = ("scaled_dot_product_attention.attn_mask",)
    expects = "A causal model stays causal, whatever function computes its attention: the mask comes as attention_mask."
    happens = (
        "attention_mask is None, and the first tokens change with the last one: they see the future. The loss falls, "
        "even "
        "faster than it should."
    )
    why = (
        "Each name has two registries, one for the function and one for the masks that it takes. A name missing from "
        "the second one gets None. By hand, an attention applies only the mask that it is given."
    )
    places = (Place(MultiheadAttention.forward, "resolve_masks("),)
    instead = (
        "Register a mask function under the same name: eager_mask gives a float mask to be added. sdpa_mask would "
        "give None too, wherever is_causal can stand in for the mask."
    )
    issues = ("huggingface/transformers#45811",)
    needs = "transformers"

    def wrong(self) -> float:
        from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

        def mine(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **rest: float
        ) -> tuple[Tensor, None]:
            scores = query @ key.mT * rest["scaling"]
            if attention_mask is not None:
                scores = scores + attention_mask
            return (scores.softmax(-1) @ value).transpose(1, 2), None

        AttentionInterface.register("mine", mine)
        sizes = {"vocab_size": 9, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 1}
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=3, attn_implementation="mine")).eval()
        first, second = model(torch.tensor([[3, 1, 4, 1], [3, 1, 4, 8]])).logits[:, :3]  # before the token that differs
        difference = (first - second).abs().max().item()
        print(f"greatest difference before the token that differs: {difference:.1g}")
        return difference

    def right(self) -> float:
        from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM
        from transformers.masking_utils import eager_mask

        def mine(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **rest: float
        ) -> tuple[Tensor, None]:
            scores = query @ key.mT * rest["scaling"]
            if attention_mask is not None:
                scores = scores + attention_mask
            return (scores.softmax(-1) @ value).transpose(1, 2), None

        AttentionInterface.register("mine with a mask", mine)
        AttentionMaskInterface.register("mine with a mask", eager_mask)
        sizes = {"vocab_size": 9, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 1}
        config = LlamaConfig(**sizes, num_attention_heads=3, attn_implementation="mine with a mask")
        model = LlamaForCausalLM(config).eval()
        first, second = model(torch.tensor([[3, 1, 4, 1], [3, 1, 4, 8]])).logits[:, :3]
        difference = (first - second).abs().max().item()
        print(f"greatest difference before the token that differs: {difference:.1g}")
        return difference

    def holds(self, wrong: float) -> bool:
        return wrong > 1e-4

    def helps(self, right: float) -> bool:
        return right == 0


class AllOnesMaskUnpacks(Trap):
    """A mask of ones lets packed sequences see one another."""

    number = 72
    name = "all_ones_mask_unpacks"
    severity = Severity.WRONG_NUMBERS
    concerns = ("scaled_dot_product_attention.attn_mask",)
    expects = (
        "position_ids that restart keep packed sequences apart, and an attention_mask of ones, which a tokenizer "
        "gives, "
        "hides nothing: it changes nothing."
    )
    happens = (
        "The second sequence changes with the first, because it sees the first one's tokens. Without the mask it does "
        "not."
    )
    why = (
        "The boundaries are read from position_ids only where no attention_mask is given. By hand, the documents are "
        "a mask of their own, which no other mask switches off."
    )
    places = (Place(score_functions.document, "document_ids[batch, q_idx]"),)
    instead = "Leave attention_mask out where rows are packed."
    issues = ("huggingface/transformers#46634",)
    needs = "transformers"

    def wrong(self) -> float:
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"vocab_size": 9, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 1}
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=3)).eval()
        rows, position_ids = torch.tensor([[3, 1, 4, 1, 5], [3, 8, 4, 1, 5]]), torch.tensor([[0, 1, 2, 0, 1]] * 2)
        packed = model(rows, attention_mask=torch.ones(2, 5).long(), position_ids=position_ids, use_cache=False)
        first, second = packed.logits[:, 3:]  # the second sequence, which is the same in both rows
        difference = (first - second).abs().max().item()
        print(f"greatest difference of the second sequence: {difference:.1g}")
        return difference

    def right(self) -> float:
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"vocab_size": 9, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 1}
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=3)).eval()
        rows, position_ids = torch.tensor([[3, 1, 4, 1, 5], [3, 8, 4, 1, 5]]), torch.tensor([[0, 1, 2, 0, 1]] * 2)
        packed = model(rows, position_ids=position_ids, use_cache=False)
        first, second = packed.logits[:, 3:]  # the second sequence, which is the same in both rows
        difference = (first - second).abs().max().item()
        print(f"greatest difference of the second sequence: {difference:.1g}")
        return difference

    def holds(self, wrong: float) -> bool:
        return wrong > 1e-4

    def helps(self, right: float) -> bool:
        return right == 0


TRAPS = (AttentionFunctionWithoutMask, AllOnesMaskUnpacks)
