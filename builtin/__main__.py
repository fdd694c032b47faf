"""``python -m builtin``: train, translate, summary and plot with the Transformer of torch.nn."""

from builtin.seq2seq import Seq2SeqTransformer
from scratch.task.command_line import command_line

app = command_line("builtin", Seq2SeqTransformer)

if __name__ == "__main__":
    app(prog_name="python -m builtin")
