"""Posting and polling in native code where it can be compiled and pyverbs' objects are as expected; else in Python."""
