"""What torch functions are called, and which only ask, only move data, work element by element, or contract."""


def words(text: str) -> frozenset[str]:
    """Give the words of a text."""
    return frozenset(text.split())


# Functions that do the same, and operators that give the same from either side.
ALIKE = {"truediv": "div", "true_divide": "div", "divide": "div", "multiply": "mul", "subtract": "sub"}
ALIKE |= {"concat": "cat", "concatenate": "cat", "rtruediv": "rdiv"}
OPERATORS = words("add sub mul truediv floordiv matmul pow mod and or xor")
COMMUTES = words("add mul and or xor")


def plain(function: str) -> str:
    """Give the one name of a torch function, of its operator and of its form in place.

    >>> [plain(name) for name in ("add", "__radd__", "add_", "__getitem__", "rsqrt", "__itruediv__", "__rsub__")]
    ['add', 'add', 'add', 'getitem', 'rsqrt', 'div', 'rsub']
    """
    name = function.strip("_")
    if function.startswith("__") and name[1:] in OPERATORS and (name[0] == "i" or name[1:] in COMMUTES):
        name = name[1:]
    return ALIKE.get(name, name)


def writes(function: str) -> bool:
    """Whether a torch function writes into its first argument, by its name."""
    operator = function.startswith("__i") and function[3:].strip("_") in OPERATORS
    return operator or function == "__setitem__" or (function.endswith("_") and not function.endswith("__"))


# What asks something about a tensor and makes none; these and the next are names as torch has them.
ASKS = words(
    "size dim numel stride is_contiguous data_ptr __len__ ndimension is_floating_point __bool__ __repr__ __format__ "
    "storage_offset untyped_storage __hash__ get_device is_complex item tolist __int__ __float__ __index__ "
    "element_size nelement has_names __array__ numpy __iter__ __set__ requires_grad_ result_type _set_grad_enabled "
    "is_nonzero is_same_size equal allclose can_cast is_tensor storage register_hook retain_grad __deepcopy__ "
    "_is_view is_set_to is_shared is_pinned layout __reduce_ex__ __dlpack__ is_inference promote_types"
)
# Properties that are operations.
GETTERS = words("T mT H mH real imag data")

# ---------------------------------------------------------------------------------------------- plain names
# What only puts elements elsewhere, or repeats or leaves out some: run on labels, it moves the labels.
MOVES = words(
    "view reshape permute transpose squeeze unsqueeze contiguous flatten unflatten chunk split tensor_split unbind "
    "getitem stack cat hstack vstack dstack expand expand_as swapaxes swapdims movedim moveaxis "
    "repeat repeat_interleave index_select roll flip tile T mT t view_as reshape_as narrow select data "
    "split_with_sizes as_strided gather take_along_dim broadcast_to adjoint unfold clone detach unsafe_chunk "
    "atleast_2d atleast_3d dsplit hsplit vsplit diagonal real pad rot90 fliplr flipud ravel take masked_select "
    "unsafe_split pixel_shuffle pixel_unshuffle channel_shuffle view_as_complex view_as_real column_stack row_stack"
)
# Moves after which pieces lie side by side.
REORDERS = words("sort topk argsort scatter scatter_add index_add msort")
INDEXED = words("embedding embedding_bag one_hot")
CONTRACTIONS = words(
    "linear matmul bmm mm einsum addmm baddbmm addbmm conv1d conv2d conv3d tensordot mv dot "
    "inner bilinear vecdot chain_matmul multi_dot conv_transpose1d conv_transpose2d"
)
ADDS = words("add sub")
MULTIPLIES = words("mul div")
STOPS_GRADIENTS = words("detach data")
FILLS = words("masked_fill where setitem")
COMPARES = words("lt le gt ge topk kthvalue")
ELEMENTWISE = words(
    "add sub rsub mul div rdiv where masked_fill maximum minimum pow lerp addcmul addcdiv fmod remainder "
    "masked_scatter fill copy atan2 copysign hypot logaddexp nextafter xlogy"
)
# What takes a second tensor for its type alone, one for its shape alone, and what folds an axis.
CASTS = words("to type_as")
CREATES = words(
    "zeros_like ones_like empty_like full_like rand_like randn_like randint_like new_zeros new_ones new_empty new_full "
    "new_tensor bernoulli zero"
)
OF_A_SHAPE = CREATES - words("new_tensor bernoulli zero")  # which take no numbers
SAMPLES = words("randn randn_like normal")  # of what is learnt, as slots are: dropping is done by other draws
DRAWS = words("rand randint randperm rand_like randint_like bernoulli multinomial uniform") | SAMPLES
UNFILLED = words("empty empty_like empty_strided new_empty new_empty_strided")
REDUCES = words(
    "sum mean max min amax amin logsumexp norm var std prod any all argmax argmin median nansum nanmean var_mean "
    "std_mean count_nonzero aminmax vector_norm"
)
NORMS = words("layer_norm rms_norm group_norm normalize instance_norm batch_norm local_response_norm")
SOFTMAXES = words("softmax safe_softmax log_softmax softmin gumbel_softmax")
# What is no function of each number alone.
MIXES = MOVES | REDUCES | NORMS | SOFTMAXES | CONTRACTIONS | words("cumsum cumprod cummax cummin logcumsumexp sort")
WEIGHS = SOFTMAXES | words("exp exp2 sigmoid")
