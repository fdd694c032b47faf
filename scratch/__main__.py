"""``python -m scratch``: train, translate, summary and plot with the hand-written Transformer."""

from scratch.seq2seq import Seq2SeqTransformer
from scratch.task.command_line import command_line

app = command_line("scratch", Seq2SeqTransformer)

if __name__ == "__main__":
    app(prog_name="python -m scratch")
