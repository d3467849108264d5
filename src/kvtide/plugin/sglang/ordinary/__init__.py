"""Ordinary servers, without disaggregation: saves and restores retracted requests there, too."""
