"""What can be wrong with a file, as exceptions to match."""


class GGUFError(ValueError):
    """A file that is not a sound GGUF file."""


class NotGGUFError(GGUFError):
    """Another kind of file, or no regular file at all."""


class VersionError(GGUFError):
    """A GGUF version or byte order that is not read here."""


class TruncatedError(GGUFError):
    """A file that ends before what its header promises."""


class MalformedError(GGUFError):
    """A header that contradicts the format."""


class UnsupportedTypeError(GGUFError):
    """A tensor type without a known size, or without kernels."""


class MissingKeyError(KeyError):
    """A tensor or metadata key that the file does not have."""

    def __str__(self) -> str:
        # KeyError would print the repr of the message.
        return str(self.args[0])
