"""Tell what something is by its name alone, without torch."""

import functools
import re

NAMES = (
    (r"attention|attn|mhs?a|multi_?head|^head$", "attention"),
    (r"feed_?forward", "feed_forward"),  # one may hold a norm, and say so in its name
    (r"layer_?norm|(^|_)norm(alization)?$|^ln$|rms_?norm", "layer_norm"),
    (r"ffn|^ff|mlp|position_?wise", "feed_forward"),
    (r"pos([a-z]{0,4}n[a-z]{0,3})?_?(enc|emb)|sinusoid|(^|_)(w?pe|positions)($|_)", "positional_encoding"),
    (r"rot(ary)?_?(pos_?)?emb|(^|_)rope($|_)|apply_rot|freqs_cis|precompute\w*(freqs|rope)", "positional_encoding"),
    (r"layer|block|encoder|decoder|transformer|gpt|bert|model|stack", "layers"),
)
OTHER_NORMS = re.compile(r"(batch|group|instance|response)_?norm", re.IGNORECASE)


@functools.lru_cache(maxsize=4096)
def kind_of_name(name: str) -> str:
    """Tell a kind from a name alone; "" if it says nothing.

    >>> kind_of_name("CausalSelfAttention"), kind_of_name("mlp"), kind_of_name("RotEmb"), kind_of_name("Thing")
    ('attention', 'feed_forward', 'positional_encoding', '')
    """
    return next((kind for pattern, kind in NAMES if re.search(pattern, words_of(name))), "")


def words_of(name: str) -> str:
    """Write a name in small letters, with the words of camel case apart."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
