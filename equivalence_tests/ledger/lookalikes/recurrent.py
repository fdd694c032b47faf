"""A decoder that goes step by step, as in Luong's attention: its state looks back at all that an encoder gave."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DotProductAttention(nn.Module):
    """No parameters; the context and the weights come back without an axis for the one query."""

    def forward(self, decoder_hidden: Tensor, encoder_outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Take (batch, hidden) and (batch, source length, hidden)."""
        scores = torch.bmm(encoder_outputs, decoder_hidden.unsqueeze(2)).squeeze(2)
        attn_weights = F.softmax(scores, dim=1)
        context = torch.bmm(attn_weights.unsqueeze(1), encoder_outputs).squeeze(1)
        return context, attn_weights


class Attention(nn.Module):
    """The method is a string; a product that is summed makes the scores, and another one the context."""

    def __init__(self, method: str, hidden_size: int) -> None:
        super().__init__()
        if method not in ["dot", "general"]:
            raise ValueError(method)
        self.method = method
        if method == "general":
            self.attn = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, hidden: Tensor, encoder_outputs: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Take what nn.GRU gives: its last state, (1, batch, hidden), and all outputs, (length, batch, hidden)."""
        energy = self.attn(encoder_outputs) if self.method == "general" else encoder_outputs
        attn_energies = torch.sum(hidden * energy, dim=2).t()
        if mask is not None:
            attn_energies = attn_energies.masked_fill(mask == 0, -1e10)
        weights = F.softmax(attn_energies, dim=1)
        return (weights.t().unsqueeze(2) * encoder_outputs).sum(0), weights


class GlobalAttention(nn.Module):
    """The context and the state go together through a matrix and tanh."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear_in, self.linear_out = nn.Linear(dim, dim, bias=False), nn.Linear(dim * 2, dim, bias=False)

    def forward(self, input: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:  # noqa: A002 -- as it is called there
        """Give the attentional state, (batch, dim)."""
        target = self.linear_in(input).unsqueeze(2)
        attn = F.softmax(torch.bmm(context, target).squeeze(2), dim=1)
        weighted = torch.bmm(attn.unsqueeze(1), context).squeeze(1)
        return torch.tanh(self.linear_out(torch.cat((weighted, input), 1))), attn
