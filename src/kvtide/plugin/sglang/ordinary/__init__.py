"""Ordinary servers, without disaggregation: saves and restores retracted requests there, too.

hooks          wraps the functions in which such a server retracts, admits and forgets requests
shelf          has the backups, and looks up who is waiting
resume         brings a request back into the running batch; allocation: acquires its slots
coverage       the servers and the requests that are left to SGLang, with reasons
"""
