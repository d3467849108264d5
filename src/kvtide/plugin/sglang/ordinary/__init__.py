"""Ordinary servers, without disaggregation: retracted requests are saved and restored as well."""
