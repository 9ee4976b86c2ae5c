"""Policies whose weights or optimizer states are shared out over ranks; imported when asked for."""
