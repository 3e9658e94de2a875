"""The error of what a user asked for and cannot have."""


class EvalError(ValueError):
    """A mistake in what an evaluation was asked for; its message is one line for the user."""
