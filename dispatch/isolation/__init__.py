"""Isolation: candidates run in a child process first, so that what they may do to a process they do to that one."""
