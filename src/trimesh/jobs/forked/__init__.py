"""A process that has imported what agents do, and forks those of a `LocalJob`: one interpreter starts in place of many.

    program --exec--> template: imports --fork--> agent --fork--> its spawner
       |                 |<---- streams of an agent, a socket for it
       |<-- pid, pidfd, then how it has ended

AF-1 A copy becomes what an executed agent is, with a session and a process group of its own and the standard input that
     is its lifeline, before it does anything; then it runs the same function.
AF-2 Copies begin as an agent that is executed by the program would: where what it would inherit has changed since, it
     is executed.
AF-3 How an agent has ended is told by its parent, the template. If that is killed, the system kills its copies, and
     that is how they have ended.
AF-4 An agent is executed, too, where the template has ended: if that could not begin, the agent says why.
AF-5 The template ends when the program has closed its end of the socket: at once when nothing of it is left, else when
     the last copy has ended, which its own lifeline sees to.
"""

from trimesh.jobs.forked.template import AgentTemplate, TemplateChild, interpreter_command

__all__ = ["AgentTemplate", "TemplateChild", "interpreter_command"]
