"""What the names of arguments mean, to constructors, to forwards and to functions that build masks.

In each table the first pattern that occurs in the lower-cased name decides.
"""

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

T = TypeVar("T")
ROLES = ("query", "key", "value")
DROPOUT = 0.25
MAX_LEN = 64
VOCABULARY = 29
CLASSES = 13


@dataclass(frozen=True)
class Sizes:
    """The sizes of one test, no two axes alike."""

    batch: int = 2
    num_heads: int = 3
    query_len: int = 5
    key_len: int = 7
    head_dim: int = 11  # width of each head
    ff_dim: int = 37  # width of the hidden layer of a feed-forward network
    num_layers: int = 2
    memory_dim: int = 0  # width of the tokens of a memory; 0 for that of all others

    @property
    def whole(self) -> bool:
        """Whether the lengths are those of a table, or the greatest that was asked for: some code takes no other."""
        return self.query_len == self.key_len != Sizes.query_len

    @property
    def embed_dim(self) -> int:
        """Width of the tokens."""
        return self.num_heads * self.head_dim

    @property
    def key_heads(self) -> int:
        """Number of heads of keys and values where groups of heads share them."""
        return self.num_heads if self.num_heads % 2 else 2


# Odd sizes show the most; code that insists on even ones, or on its own defaults, gets what it asks for.
SIZES = (
    *(Sizes(), Sizes(num_heads=3, head_dim=10), Sizes(num_heads=4, head_dim=8)),
    *(Sizes(num_heads=4, head_dim=16), Sizes(num_heads=8, head_dim=64)),
)

COUNTS_KEY_HEADS = r"(kv|key_value|group|kv_n)_?\w*(head|group)|heads?_kv|query_groups|n_local_kv|(n|num|h)_?kv(_?h)?$"
IMAGE_SIDE, PATCH_SIDE = 8, 2
GRID, RESOLUTION = (4, 8), r"^(in(put)?_?|patch\w*_)?(res(olution)?|grid(_?size)?|hw|spatial_shape)$"  # rows, columns

# What an argument of a constructor is given.
SIZE_NAMES: tuple[tuple[str, Callable[[Sizes], Any]], ...] = (
    (r"drop|(^|_)p(drop)?$|attn_pd|resid_pd|prob|^(?!(dilat|sampl|fram)\w*_)\w+_rate$", lambda s: DROPOUT),
    (
        r"vocab|num_embed(?!$)|n_token|ntoken|num_tokens|src_size|tgt_size|trg_size|^(n|num)_?(items?|users?)$|^(item|user)_?(num|count|size)$",
        lambda s: VOCABULARY,
    ),
    (r"^(n|nb|num)_?(class(es)?|cls|labels|categories)$", lambda s: CLASSES),
    (COUNTS_KEY_HEADS, lambda s: s.key_heads),
    (
        r"head_?(dim|size|width|features|hidden|channels)|(dim|d|size)_?(per_)?heads?$|^d_?[kqv]{1,2}$|^(key|query|value)_?dim$|^depth_k|^dk$|^dv$",
        lambda s: s.head_dim,
    ),
    (r"head|^h$|^nh$", lambda s: s.num_heads),
    (r"(^|_|norm)eps(ilon)?($|_)", lambda s: 1e-5),
    (
        r"n_?layers?$|num_?(hidden_)?(\w*_)?layers?|^layers$|^depth$|n_?blocks?$|num_?blocks?|^n$|^num_?\w*layers|^[ed]_layers$|^n_[a-z]+_layers?$",
        lambda s: s.num_layers,
    ),
    (
        r"max_?\w*len|max_?\w*pos|block_?size|(?<!\bd_)(?<!dim_)context(?!_?(dim|width|feat|chan|emb))|seq_?(uence_)?len|n_?ctx|(max|n|num)_?seq|^seq(uence)?$|n_?positions?|max_?tokens|window|(num|n|max|total)_?(time_?)?steps|^(max_?)?(t|l)$|^t_total$|position_embeddings|src_len|tgt_len|(num|n)_(patches|pixels)|^length$|^max_?size$|^(in(put)?|pred(iction)?|label|out(put)?)_?len(gth)?$|^horizon$|look_?back",
        lambda s: MAX_LEN,
    ),
    (
        r"^(?!.*(factor|ratio|expan|multiple$)).*(ff|feed_?forward|inner|interm|mlp_?(dim|hidden)|hidden_?(features|units)|dim_?hid|pf_dim|ffn|d_?hid|mult)",
        lambda s: s.ff_dim,
    ),
    (r"^(image|img)_?(size|res(olution)?|side|h(eight)?|w(idth)?)$", lambda s: IMAGE_SIDE),
    (r"^(image|img)_?shape$", lambda s: (3, IMAGE_SIDE, IMAGE_SIDE)),
    (r"^patch_?(size|len(gth)?|h(eight)?|w(idth)?)?$|^stride$", lambda s: PATCH_SIDE),
    (RESOLUTION, lambda s: GRID),
    (r"kernel_?(size|width|len(gth)?)?$", lambda s: 3),
    (r"^shift_?(size)?$", lambda s: 0),
    (r"relative\w*buckets", lambda s: 32),
    (r"bias|^scale_(attn|attention|scores?|weights)(_weights)?$", lambda s: True),
    (r"^scale_\w+|^reorder_", lambda s: False),
    (r"pad_?\w*(idx|id|index|token)|(idx|id|index|token)_?pad|^pad$", lambda s: 0),
    (r"device", lambda s: "cpu"),
    (r"dtype", lambda s: torch.float32),
    (r"act(ivation)?(_?fn|_?func(tion)?)?$|^hidden_act$", lambda s: "relu"),
    (
        r"^(d|dim)_?(cross|decoder|context)\w*$|(cross|decoder)\w*(dim|width|channels|features|size)$",
        lambda s: s.embed_dim,
    ),
    (
        r"scale$|is_\w+|use_\w+|causal|flash|mask|return|output_att|pre_?norm|norm_first|verbose|sdpa|cross|decoder|gradient_check",
        lambda s: False,
    ),
    (r"theta|(^|_)base$", lambda s: 10000.0),
    (
        r"emb|(?<!num_)dim|model|hid|width|channel|(^|_)ch(an)?s?$|feature|units?$|size|state|^d$|^e$|^c$|^k$|^in$|^out$|d_?in$|d_?out$|n_?in$|n_?out$|shape",
        lambda s: s.embed_dim,
    ),
)
# What else it may be given, where its name means one thing here and another there.
AMBIGUOUS: tuple[tuple[str, Callable[[Sizes], list[Any]]], ...] = (
    (r"^(query|key|value)_?(dim|size)$", lambda s: [s.embed_dim, s.head_dim]),
    (r"d_?hid|^(n_?|dim_?)?hid(den)?(_?dim|_?size)?$", lambda s: [s.embed_dim, s.ff_dim]),
    (r"^num_embed$", lambda s: [s.embed_dim, VOCABULARY]),
    (r"ffn?_\w*out", lambda s: [s.embed_dim, s.ff_dim]),
    (r"^(d|dim)_?out$", lambda s: [s.num_heads * (s.head_dim + 2), s.embed_dim]),  # a scale may take the wrong width
    (r"hidden_?units", lambda s: [s.ff_dim, s.embed_dim]),
    (r"(?<!image_)(?<!img_)shape", lambda s: [s.embed_dim, [s.embed_dim], (3, IMAGE_SIDE, IMAGE_SIDE)]),
    (r"^size$", lambda s: [s.embed_dim, IMAGE_SIDE]),
    (r"window", lambda s: [MAX_LEN, (2, 4), 4]),  # the length of a window, or the side of one; they divide GRID
    (r"^shift_?(size)?$", lambda s: [0, (1, 1), 1]),
)
# Parts that an argument may want handed over, by its name, and how classes of such parts are called.
ROTATES = r"^rope$|rotary|^pos(itional)?_?enc(oding)?$|^pos(ition)?_?emb(edding)?$"
FEEDS_FORWARD = r"feed_?forward|^r?ffn?\d?$|^mlp\d?$|(pos(ition)?|row)_?wise"
PARTS = (
    (r"attn|attention", r"^(?!.*norm).*(attention|attn)"),
    (ROTATES, r"rope|rotary|^pos.*(enc|emb)"),
    (FEEDS_FORWARD, r"^(?!.*norm).*(feed_?forward|ffn|mlp)"),
    (r"^(encoder|decoder)?_?(layer|block)$", r"^(?!.*norm).*(?<!sub)(layer|block)$"),
)
OF_A_NUMBER = re.compile(
    r"^(n|num|max|is|use|has|with)_|_(heads?|dims?|size|width|layers|dropout|drop|rate|prob|len|length|bias|type|window)$"
)
CONFIG = re.compile(r"config|cfg|(^|_)args$|params|hparams|options|^opts?$|settings|hyper")
# To which of several sequences in one row each token belongs: it sees those of its own.
SEGMENTS = re.compile(r"(seg(ment)?|doc(ument)?|sample|pack(ed)?|example)s?_?(ids?|idx|indices)$|seq(uence)?_?idx$")
# What an argument of a forward is given.
ROLE_NAMES = (
    (
        r"^freq($|_c)|^(freqs|angles?|rope|rotary|cos|sin|pos(ition)?_?emb(edding)?s?)($|_)|freqs_c|(^|_)(cos|sin|rope)$",
        "angles",
    ),
    (r"mask|valid_?len|lengths?$|^lens$|seq_len|attn_bias|^bias$|padding|(^|_)pads?$|^m$", "mask"),
    (SEGMENTS.pattern, "mask"),
    (r"^\w{0,4}q$|_q$|^q_?\w{0,5}$|quer(y|ies)|^tgt$|^target$|^trg$|dec(oder)?_?(in|hid|x)\w*|^x_?1$", "query"),
    (r"^(?!chunk|block|rank|top)\w{0,4}k$|(?<!top)_k$|^k(_?(in|s|x)|eys?\w*)?$|(^|_)key(s|_?in\w*|_states)?$", "key"),
    (r"^(?!prev|conv)\w{0,4}v$|_v$|^v_?(in|s|x)?$|^values?\w*$|(^|_)value(s|_?in\w*|_states)?$", "value"),
    (r"mem|enc|context|(^|_)kv|cond|^y$|cross|source|^xa$|other|^x_?2$|^z$", "memory"),
    (r"^x$|^qkv$|hidden|input|^src$|emb|token|^h$|feature|seq|^inp$|^x_?\w*$|states?$|data", "input"),
)
# What is added to tokens where they are compared, as DETR does it: one vector for each.
ADDED_POSITIONS = re.compile(
    r"^(\w+_)?pos(ition(al)?)?(_?(emb(ed(ding)?s?|d)?|enc(oding)?s?))?$|^quer(y|ies)_?emb(ed(ding)?s?|d)?$"
)
# What an argument of a function that builds masks is given.
MASK_ROLES = (
    (r"device", "device"),
    (r"dtype", "dtype"),
    (
        r"(pad|ignore)_?\w*(id|idx|index|token|value|symbol)|(id|idx|index)_?pad|^pad$|^(src|tgt|trg|target)_?pad$",
        "pad_id",
    ),
    (r"prefix", "prefix"),
    (r"window|width|band", "window"),
    (r"head", "heads"),
    (r"^(b|bs|bsz)$|batch_?size|num_?batch|n_?batch", "samples"),
    (r"lengths$|lens$|valid_?len|_lengths?_|^(x|y)?_?lengths?$", "lengths"),
    (r"shape", "shape"),
    (r"^(k|key|src|source|mem|memory)_?(len|length|size|seq_?len)$", "key_size"),
    (
        r"max_?len|^(sz|size|n|t|l|s|q|dim|num|len)$|_(len|length|size|sz)$|^(seq|target|tgt|trg|q|query)_?(len|size)",
        "size",
    ),
    (r"^(k|key|keys|seq_k|src|source|enc\w*|k_\w+)$", "key_ids"),
    (r"mask|padding", "keep"),
    (r"ids|seq|pad|tokens?|^x$|inputs?$|tgt|trg|target|^q$|quer|dec|batch|src|data|sent|y", "ids"),
)


def first_match(name: str, table: Sequence[tuple[str, T]], unknown: T) -> T:
    """Say what the first pattern that occurs in a name stands for, whatever the case of its letters.

    >>> first_match("Src_Mask", [("mask", "a mask"), ("src", "the source")], "")
    'a mask'
    """
    return next((meaning for pattern, meaning in table if re.search(pattern, name.lower())), unknown)


def value_for(name: str, sizes: Sizes) -> tuple[bool, Any]:
    """Say what a constructor argument of this name probably wants, and whether anything is known.

    >>> [value_for(name, Sizes()) for name in ("n_heads", "d_model", "num_items", "num_classes", "d_ff", "seq")]
    [(True, 3), (True, 33), (True, 29), (True, 13), (True, 37), (True, 64)]
    >>> [value_for(name, Sizes()) for name in ("ff_expansion_factor", "time_multiple", "zebra")]
    [(False, None), (False, None), (False, None)]
    """
    value = first_match(name, SIZE_NAMES, None)
    return value is not None, value(sizes) if value else None


@functools.lru_cache(maxsize=4096)
def role_of_parameter(name: str) -> str:
    """Say what the name of an argument says.

    >>> [role_of_parameter(name) for name in ("queries", "x", "attention_mask", "memory", "v_in", "rotary_pos_emb")]
    ['query', 'input', 'mask', 'memory', 'value', 'angles']
    >>> [role_of_parameter(name) for name in ("inputs_q", "inputs_kv", "prev", "top_k")]
    ['query', 'memory', '', '']
    """
    return first_match(name, ROLE_NAMES, "")
