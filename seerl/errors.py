"""Faults that are the user's to mend: one clear message, exit code 2, no traceback unless asked for."""


class UserError(Exception):
    """A mistake in what the user gave (configuration, data, files). The message names the key, file, row or
    device, what is allowed and what to do."""
