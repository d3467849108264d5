"""Small pools of every class that SGLang has, and round trips of them: for tests and the doctor."""
