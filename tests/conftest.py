"""What all tests share."""

from hypothesis import settings

# No test asserts how long something takes.
settings.register_profile("any speed", deadline=None)
settings.load_profile("any speed")
