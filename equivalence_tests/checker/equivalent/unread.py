"""Why no equivalent could be made."""


class UnreadError(Exception):
    """What the code does is not among the parts that an equivalent is made of."""
