"""Characters for texts that hypothesis draws."""

CHARACTERS = "aZ09 .,:;-_+*&!?#%/\\'\"`<>[]{}()|=~$@\n\r\t\0\x1béß漢\u0301\u200b\u2028\U0001f600"
"""ASCII with its special characters, controls, accents, other scripts and planes.

All of Unicode, hypothesis's default, costs each process three seconds in a fresh clone.
"""
