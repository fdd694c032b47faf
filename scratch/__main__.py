"""``python -m scratch``: train, translate, summary and plot with the hand-written Transformer."""

from scratch.command_line import command_line
from scratch.seq2seq import Seq2SeqTransformer

app = command_line("scratch", Seq2SeqTransformer)

if __name__ == "__main__":
    app(prog_name="python -m scratch")
