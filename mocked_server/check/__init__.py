"""`python -m mocked_server.check`: can this agent be trained?"""
