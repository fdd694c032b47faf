"""Which torch functions only ask, only move data, work element by element, or contract."""


def words(text: str) -> frozenset[str]:
    """Give the words of a text."""
    return frozenset(text.split())


# What tells something about a tensor and makes none.
ASKS = words(
    "size dim numel stride is_contiguous data_ptr __len__ ndimension is_floating_point __bool__ __repr__ __format__ "
    "storage_offset untyped_storage __hash__ get_device is_complex item tolist __int__ __float__ __index__ "
    "element_size nelement has_names __array__ numpy __iter__ __set__ requires_grad_ result_type _set_grad_enabled "
    "is_nonzero is_same_size equal allclose can_cast is_tensor storage register_hook retain_grad __deepcopy__ "
    "_is_view is_set_to is_shared is_pinned layout __reduce_ex__ __dlpack__ is_inference promote_types"
)
# Properties that are operations.
GETTERS = words("T mT H mH real imag data")
# What only puts elements elsewhere, or repeats or leaves out some: run on labels, it moves the labels.
MOVES = words(
    "view reshape permute transpose squeeze unsqueeze contiguous flatten unflatten chunk split tensor_split unbind "
    "__getitem__ stack cat concat concatenate hstack vstack dstack expand expand_as swapaxes swapdims movedim moveaxis "
    "repeat repeat_interleave index_select roll flip tile T mT t view_as reshape_as narrow select data "
    "split_with_sizes as_strided gather take_along_dim broadcast_to adjoint unfold clone detach unsafe_chunk "
    "atleast_2d atleast_3d dsplit hsplit vsplit diagonal real pad rot90 fliplr flipud ravel take masked_select "
    "unsafe_split swapaxes_ squeeze_ unsqueeze_ transpose_ t_ pixel_shuffle pixel_unshuffle channel_shuffle "
    "view_as_complex view_as_real column_stack row_stack __iter__ movedim_"
)
# Moves after which pieces lie side by side.
REORDERS = words("sort topk argsort scatter scatter_ scatter_add scatter_add_ index_add index_add_ msort")
INPLACE = words(
    "__iadd__ __isub__ __imul__ __itruediv__ __setitem__ __imatmul__ __ipow__ __iand__ __ior__ __ifloordiv__ "
    "__imod__ __ixor__"
)
INDEXED = words("embedding embedding_bag one_hot")
CONTRACTIONS = words(
    "linear matmul __matmul__ bmm mm einsum addmm baddbmm addbmm conv1d conv2d conv3d tensordot mv dot "
    "inner bilinear vecdot chain_matmul multi_dot conv_transpose1d conv_transpose2d"
)
ELEMENTWISE = words(
    "add __add__ __radd__ __iadd__ add_ sub __sub__ __rsub__ __isub__ sub_ subtract mul __mul__ __rmul__ __imul__ "
    "mul_ multiply div __truediv__ __rtruediv__ __itruediv__ div_ divide true_divide where masked_fill masked_fill_ "
    "maximum minimum pow __pow__ __ipow__ pow_ lerp addcmul addcdiv fmod remainder masked_scatter masked_scatter_ "
    "rsub fill_ copy_ atan2 copysign hypot logaddexp nextafter xlogy"
)
# What takes a second tensor for its type alone, one for its shape alone, and what folds an axis.
CASTS = words("to type_as")
CREATES = words(
    "zeros_like ones_like empty_like full_like rand_like randn_like randint_like new_zeros new_ones new_empty new_full "
    "new_tensor bernoulli zero_"
)
UNFILLED = words("empty empty_like empty_strided new_empty new_empty_strided")
REDUCES = words(
    "sum mean max min amax amin logsumexp norm var std prod any all argmax argmin median nansum nanmean var_mean "
    "std_mean count_nonzero aminmax vector_norm"
)
NORMS = words("layer_norm rms_norm group_norm normalize instance_norm batch_norm local_response_norm")
SOFTMAXES = words("softmax _softmax _safe_softmax log_softmax softmin gumbel_softmax")
