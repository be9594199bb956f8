"""The admin console: what the fleet is doing, and why not more, in a browser.

It is a client of the API and nothing else: each screen asks documented calls of ``/api/v1`` with
the session of whoever looks at it, in process, so that rights and refusals are the API's own.

- ``mount``: NiceGUI's application under the API's, and the gate before it
- ``client``: calls of the API in somebody's name
- ``view``: what a screen is, and the frame around each
- ``elements``: the parts that screens are made of; their browser side is in ``static``
- ``screens``: one module a screen
"""

from hetertrain_cloud.console.mount import mount_console

__all__ = ["mount_console"]
