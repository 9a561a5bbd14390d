"""The terminal, a pipe or a file: where the command line prints."""

from rich.console import Console

BROKEN_PIPE_CODE = 141  # 128 + SIGPIPE, as of a command that knows nothing of pipes


class Output(Console):
    """Prints text as it is, and ends the process quietly when the reader, `head` say, has left."""

    def __init__(self) -> None:
        super().__init__(markup=False, highlight=False)

    def on_broken_pipe(self) -> None:
        """End; a run that was under way is interrupted and can be continued."""
        try:
            super().on_broken_pipe()
        except SystemExit:
            raise SystemExit(BROKEN_PIPE_CODE) from None
