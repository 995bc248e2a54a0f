"""The one exception of the package."""


class Error(ValueError):
    """A call was refused. Nothing has been computed or written.

    Attributes:
        code: "invalid_argument", "mismatch", "unsupported", "unavailable" or "internal".
        argument: name of the argument that is wrong.
        value: what was given.
        allowed: what is allowed, and what to do.
    """

    code: str
    argument: str
    value: str
    allowed: str

    def __init__(self, code: str, argument: str, value: str, allowed: str) -> None:
        super().__init__(code, argument, value, allowed)
        self.code = code
        self.argument = argument
        self.value = value
        self.allowed = allowed

    def __str__(self) -> str:
        return f"{self.argument}: got {self.value}; allowed: {self.allowed}"
