"""How a command ends when it cannot do what was asked."""

import click


class CommandError(click.ClickException):
    """Ends the command with exit code 1, a message and a hint on standard error."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint

    def format_message(self) -> str:
        return f"{self.message}\nHint: {self.hint}"
