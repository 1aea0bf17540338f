#include "launcher/command_line.h"

int main(int argc, char** argv) { return regather::regather_main(argc, argv); }
