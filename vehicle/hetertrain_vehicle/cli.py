"""Commands of this part."""

NEEDS: tuple[str, ...] = ()
