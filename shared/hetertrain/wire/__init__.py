"""What travels between nodes: messages, contents, transfers, and both ends of the conversation.
Pure, without IO.
"""
