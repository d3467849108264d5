"""Ordinary servers: those without disaggregation save and restore retracted requests as well."""
