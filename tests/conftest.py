"""What all tests share."""

import signal

from hypothesis import settings

# No test asserts how long something takes.
settings.register_profile("any speed", deadline=None)
settings.load_profile("any speed")

# A shell's background commands ignore Ctrl-C, and so would the programs that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
