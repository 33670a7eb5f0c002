@echo off
rem Profiles the stages of a graph network in a conda environment. extras/graph_stages/README.md says more.
rem
rem   run_profiling.bat                         environment MIX, everything (--all)
rem   run_profiling.bat NAME                    another environment
rem   run_profiling.bat NAME --measure --runs 20     with options of profile_stages.py
setlocal
rem before shift, which changes the name of this file, too
set "HERE=%~dp0"
set "ENVIRONMENT=%~1"
if "%ENVIRONMENT%"=="" set "ENVIRONMENT=MIX"
set "STARTED_BY_CLICK="
if "%~1"=="" set "STARTED_BY_CLICK=1"

set "OPTIONS="
:next
shift
if "%~1"=="" goto ready
set OPTIONS=%OPTIONS% %1
goto next
:ready
if not defined OPTIONS set "OPTIONS=--all"

where conda >nul 2>nul
if errorlevel 1 (
    echo error: conda is not on the PATH; start this file from the Anaconda Prompt
    set "CODE=1"
    goto end
)
call conda activate "%ENVIRONMENT%"
if errorlevel 1 (
    echo error: there is no conda environment %ENVIRONMENT%; name yours: run_profiling.bat NAME
    set "CODE=1"
    goto end
)

rem so that tables redirected to a file need no particular code page
set "PYTHONUTF8=1"
pushd "%HERE%..\.."
python extras\graph_stages\profile_stages.py %OPTIONS%
set "CODE=%ERRORLEVEL%"
popd

:end
if defined STARTED_BY_CLICK pause
exit /b %CODE%
