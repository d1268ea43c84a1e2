"""Small changes of the code, one at a time: a change that no test notices is a hole in the tests."""
