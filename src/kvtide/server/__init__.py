"""`kvtide serve`: an engine behind OpenAI's HTTP API.

`loop` owns the engine, in a thread of its own. `intake` makes requests of bodies, `answers` makes
bodies of answers, `app` has the routes, and `lifecycle` starts and ends it all. `events` and
`webpage` show what an engine does.
"""
